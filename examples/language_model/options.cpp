#include "options.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>

namespace language_model {
namespace {

constexpr const char* kAbout =
    "Trains a byte-level language model (Gated DeltaNet or Kimi delta attention) on text, its attention layers computed by Thalweg, compares "
    "it with gzip and xz on held-out text, and lets it write.";

std::map<std::string, Mixer> mixer_names() { return {{"gdn", Mixer::kGdn}, {"kda", Mixer::kKda}}; }

}  // namespace

std::optional<Options> parse_options(int argc, char** argv, int* status) {
  Options o;
  CLI::App app(kAbout, "language_model");
  app.option_defaults()->always_capture_default()->take_last();
  app.add_option("--text", o.text, "text file to learn from, its last tenth held out; default: the texts of /usr/share/common-licenses, MPL-2.0 held out");
  app.add_option("--minutes", o.training.minutes, "how long to train")->check(CLI::PositiveNumber);
  app.add_option("--steps", o.training.steps, "train this many steps instead; 0: by --minutes")->check(CLI::NonNegativeNumber);
  app.add_option("--stop-after", o.training.stop_after, "save and stop after so many steps, as on Ctrl-C; 0: do not")->check(CLI::NonNegativeNumber);
  app.add_option("--out", o.out, "folder for checkpoint.safetensors, curve.svg, sample.txt");
  app.add_option("--checkpoint", o.checkpoint, "checkpoint file, if not in --out");
  auto* resume = app.add_flag("--resume", o.resume, "go on from the checkpoint, which must be there; an interrupted run goes on without asking");
  app.add_flag("--fresh", o.fresh, "start anew, whatever the checkpoint")->excludes(resume);
  app.add_option("--seed", o.training.seed, "of weights, crops, dropout and the sample");
  app.add_option("--threads", o.threads, "0: as many as Thalweg uses by default")->check(CLI::Range(0, 1024));
  app.add_option("--prompt", o.prompt, "what the sample goes on from");
  app.add_option("--generate", o.generate, "bytes of the sample")->check(CLI::NonNegativeNumber);
  app.add_option("--temperature", o.temperature, "of the sample; 0: always the likeliest byte")->check(CLI::NonNegativeNumber);
  app.add_flag("--check-gradients", o.check_gradients, "only check the backward pass against finite differences");

  auto size = CLI::Range(1, 65536);
  const char* sizes = "Model and training";
  app.add_option("--mixer", o.model.mixer, "gdn: gated delta rule; kda: Kimi delta attention, a decay for each key channel")
      ->transform(CLI::CheckedTransformer(mixer_names(), CLI::ignore_case))
      ->default_str("gdn")->group(sizes);
  app.add_option("--layers", o.model.layers, "blocks")->check(size)->group(sizes);
  app.add_option("--width", o.model.D, "of the residual stream")->check(size)->group(sizes);
  app.add_option("--heads", o.model.H, "")->check(size)->group(sizes);
  app.add_option("--key", o.model.K, "key size of a head")->check(CLI::Range(1, 512))->group(sizes);
  app.add_option("--value", o.model.V, "value size of a head")->check(CLI::Range(1, 512))->group(sizes);
  app.add_option("--conv", o.model.W, "width of the short convolution")->check(CLI::Range(1, 8))->group(sizes);
  app.add_option("--hidden", o.model.F, "hidden size of the MLP")->check(size)->group(sizes);
  app.add_option("--batch", o.training.B, "crops a step")->check(size)->group(sizes);
  app.add_option("--crop", o.training.T, "bytes a crop")->check(size)->group(sizes);
  app.add_option("--learning-rate", o.training.learning_rate, "at its highest")->check(CLI::PositiveNumber)->group(sizes);
  app.add_option("--weight-decay", o.training.weight_decay, "")->check(CLI::NonNegativeNumber)->group(sizes);
  app.add_option("--dropout", o.training.dropout, "")->check(CLI::Range(0.0, 0.9))->group(sizes);
  app.add_option("--averaging", o.training.averaging, "decay of the running mean of the weights that is judged; 0: none")->check(CLI::Range(0.0, 0.9999))->group(sizes);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    *status = app.exit(e) == 0 ? 0 : 2;
    return std::nullopt;
  }
  if (o.checkpoint.empty()) o.checkpoint = o.out + "/checkpoint.safetensors";
  return o;
}

std::map<std::string, std::string> identity_of(const Options& o, const Corpus& corpus) {
  const Config& c = o.model;
  const TrainingOptions& t = o.training;
  auto whole = [](auto value) { return std::to_string(value); };
  auto real = [](float value) { return fmt::format("{:g}", value); };
  return {{"mixer", c.mixer == Mixer::kGdn ? "gdn" : "kda"}, {"layers", whole(c.layers)}, {"width", whole(c.D)}, {"heads", whole(c.H)},
          {"key", whole(c.K)}, {"value", whole(c.V)}, {"conv", whole(c.W)},
          {"hidden", whole(c.F)}, {"batch", whole(t.B)}, {"crop", whole(t.T)},
          {"learning-rate", real(t.learning_rate)}, {"weight-decay", real(t.weight_decay)},
          {"dropout", real(t.dropout)}, {"averaging", real(t.averaging)}, {"seed", whole(t.seed)}, {"text", corpus.fingerprint()}};
}

}  // namespace language_model
