// Trains a byte-level language model whose attention layers Thalweg computes. Start reading at mixer.h.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "checkpoint.h"
#include "compressors.h"
#include "data.h"
#include "decode.h"
#include "gradient_check.h"
#include "options.h"
#include "products.h"
#include "svg.h"
#include "trainer.h"

namespace language_model {
namespace {

constexpr int kWrong = 1, kUser = 2, kInterrupted = 130;
constexpr double kDecodeTolerance = 1e-4;

void write_text(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << text;
  file.flush();
  if (!file) throw UserError(path + ": cannot be written");
}

void make_folder(const std::string& path) {
  std::error_code error;
  if (path.empty()) return;
  std::filesystem::create_directories(path, error);
  if (error) throw UserError(fmt::format("{}: cannot be made ({})", path, error.message()));
}

void introduce(const Options& o, const Corpus& corpus, const Model& model, const Threads& threads,
               const char* blas) {
  fmt::print("Thalweg {} ({}), {} threads; dense products: {}\n", thalweg_version(), thalweg_cpu_isa(), threads.count(),
             blas);
  auto bytes = [](const Bytes& text) { return grouped(int64_t(text.size())); };
  fmt::print("learns from  {} ({} bytes)\n", corpus.training_name, bytes(corpus.training));
  fmt::print("validation   {} ({} bytes)\n", corpus.validation_name, bytes(corpus.validation));
  fmt::print("held out     {} ({} bytes)\n", corpus.held_out_name, bytes(corpus.held_out));
  fmt::print("model        {} parameters: {} blocks of width {}, {} heads of {} x {}, {}\n", grouped(model.num_parameters()),
             o.model.layers, o.model.D, o.model.H, o.model.K, o.model.V,
             o.model.mixer == Mixer::kGdn ? "gated delta rule" : "Kimi delta attention");
}

// Goes on from a checkpoint where there is one to go on from.
void restore(const Options& o, const std::map<std::string, std::string>& identity, Model& model, TrainingState& state) {
  bool there = std::filesystem::exists(o.checkpoint);
  if (o.resume && !there) throw UserError(o.checkpoint + ": missing, expected a checkpoint to resume from");
  if (o.fresh || !there) return;
  std::vector<float> untrained = model.weights();
  TrainingState loaded(model);
  load_checkpoint(o.checkpoint, identity, model, loaded);
  if (!o.resume && progress_of(o.training, loaded) >= 1) {  // of a run that had ended: start anew
    std::copy(untrained.begin(), untrained.end(), model.weights().begin());
    return;
  }
  fmt::print("resumed      {} at step {}, after {:.0f} s of training\n", o.checkpoint, loaded.step, loaded.seconds);
  state = std::move(loaded);
}

std::string verdict(double model, double gzip, double xz) {
  return fmt::format("The model needs {} bits than gzip -9, and {} than xz -9 that has read the training text.",
                     model < gzip ? "fewer" : "more", model < xz ? "fewer" : "more");
}

std::string compare(const Corpus& corpus, const TrainingState& state, double bits, double gzip, double xz) {
  std::string text = fmt::format("bits per byte of {} ({} bytes)\n", corpus.held_out_name, grouped(int64_t(corpus.held_out.size())));
  text += fmt::format("  {:.3f}  this model, step {} (the best by validation: {:.3f} there)\n", bits, state.best_step, state.best_validation);
  text += fmt::format("  {:.3f}  gzip -9 (zlib, level 9)\n", gzip);
  text += fmt::format("  {:.3f}  xz -9 with the training text in front (liblzma, preset 9): the number to chase with --minutes\n", xz);
  return text + verdict(bits, gzip, xz) + "\n";
}

std::string chart(const Corpus& corpus, const TrainingState& state, double gzip, double xz) {
  Series training{"training", "#999999", {}, {}}, validation{"validation", "#1f77b4", {}, {}};
  Series held_out{"held-out", "#d62728", {}, {}};
  for (const CurvePoint& point : state.curve) {
    for (Series* s : {&training, &validation, &held_out}) s->x.push_back(point.seconds);
    training.y.push_back(point.training);
    validation.y.push_back(point.validation);
    held_out.y.push_back(point.held_out);
  }
  return draw_chart("Byte-level language model; held out: " + corpus.held_out_name, "seconds of training", "bits per byte",
                    {training, validation, held_out}, {{"gzip -9", gzip}, {"xz -9, trained", xz}});
}

// Judges the best weights, lets them write, and leaves the pictures and texts in --out.
int report(const Options& o, const Corpus& corpus, Model& model, Threads& threads, const TrainingState& state) {
  if (state.best_weights.empty()) throw UserError(o.checkpoint + ": has no evaluated weights yet: train longer");
  std::copy(state.best_weights.begin(), state.best_weights.end(), model.weights().begin());
  double gzip = gzip_bits_per_byte(corpus.held_out), xz = xz_bits_per_byte(corpus.held_out, corpus.training);
  double bits = bits_per_byte(model, threads, corpus.held_out);
  std::string summary = compare(corpus, state, bits, gzip, xz);
  fmt::print("\n{}\n", summary);

  Bytes start(corpus.held_out.begin(), corpus.held_out.begin() + std::min<std::ptrdiff_t>(300, std::ssize(corpus.held_out)));
  double difference = decode_difference(model, start);
  bool agree = difference <= kDecodeTolerance;
  fmt::print("decode and chunked forward: logits of {} bytes differ by at most {:.1e} ({} {:.0e})\n", start.size(), difference,
             agree ? "within" : "MORE THAN", kDecodeTolerance);

  if (o.generate > 0) {
    std::string sample = generate(model, o.prompt, o.generate, o.temperature, o.training.seed);
    fmt::print("\nsample, temperature {:g}:\n\n{}{}\n\n", o.temperature, o.prompt, sample);
    write_text(o.out + "/sample.txt", fmt::format("{}\nSample, temperature {:g}:\n\n{}{}\n", summary, o.temperature, o.prompt, sample));
  }
  write_text(o.out + "/curve.svg", chart(corpus, state, gzip, xz));
  fmt::print("wrote {0}/curve.svg{1}; checkpoint: {2}\n", o.out, o.generate > 0 ? ", " + o.out + "/sample.txt" : "", o.checkpoint);
  return agree ? 0 : kWrong;
}

int run(const Options& o) {
  Threads threads(o.threads > 0 ? o.threads : thalweg_default_threads());
  const char* blas = prepare_blas();
  if (o.check_gradients) return check_gradients(threads, o.model.mixer, o.training.seed) ? 0 : kWrong;
  Corpus corpus = o.text.empty() ? licenses() : corpus_of_file(o.text);
  check_length(corpus, o.training.T);
  make_folder(o.out);
  make_folder(std::filesystem::path(o.checkpoint).parent_path());
  Model model(o.model, threads);
  initialise(o.model, o.training.seed, model.weights());
  introduce(o, corpus, model, threads, blas);
  TrainingState state(model);
  auto identity = identity_of(o, corpus);
  restore(o, identity, model, state);
  if (train(model, threads, corpus, o.training, o.checkpoint, identity, state) == Ending::kInterrupted) {
    fmt::print("interrupted at step {}: saved in {}; the same command goes on from there\n", state.step, o.checkpoint);
    return kInterrupted;
  }
  return report(o, corpus, model, threads, state);
}

}  // namespace
}  // namespace language_model

int main(int argc, char** argv) {
  using namespace language_model;
  int status = 0;
  try {
    auto options = parse_options(argc, argv, &status);
    return options ? run(*options) : status;
  } catch (const UserError& e) {
    std::fflush(stdout);
    fmt::print(stderr, "language_model: {}\n", e.what());
    return kUser;
  } catch (const std::exception& e) {
    std::fflush(stdout);
    fmt::print(stderr, "language_model: {}\n", e.what());
    return kWrong;
  }
}
