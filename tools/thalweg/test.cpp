// The tool: readers and writers of files, and the command line from outside (exit codes, error texts).
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "testing/testing.h"
#include "tools/thalweg/args.h"
#include "tools/thalweg/measure.h"
#include "tools/thalweg/npy.h"
#include "tools/thalweg/safetensors.h"
#include "tools/thalweg/tool.h"

namespace thalweg {
namespace {

using files::Array;
using files::FileError;

class Folder {
 public:
  Folder() {
    std::string name = (std::filesystem::temp_directory_path() / "thalweg-test-XXXXXX").string();
    if (!::mkdtemp(name.data())) throw std::runtime_error("no temporary folder");
    path_ = name;
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  std::string file(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

std::vector<std::byte> bytes_of(const std::string& text) {
  std::vector<std::byte> out(text.size());
  std::memcpy(out.data(), text.data(), text.size());
  return out;
}

std::string with_header(const std::string& header, const std::string& data = "") {
  std::string out(8, '\0');
  for (size_t i = 0; i < 8; ++i) out[i] = char(uint64_t(header.size()) >> (8 * i) & 0xff);
  return out + header + data;
}

// The text of the FileError that parsing throws; "" when it does not throw.
std::string safetensors_error(const std::string& file) {
  try {
    files::parse_safetensors(bytes_of(file), "f");
  } catch (const FileError& e) {
    return e.what();
  }
  return "";
}

std::string npy_error(const std::string& file) {
  try {
    files::parse_npy(bytes_of(file), "f");
  } catch (const FileError& e) {
    return e.what();
  }
  return "";
}

template <class T>
Array array_of(const std::string& name, thalweg_dtype dtype, std::vector<int64_t> shape, const std::vector<T>& data) {
  return {name, dtype, std::move(shape), {}, std::as_bytes(std::span(data))};
}

TEST(Safetensors, WritesWhatItReads) {
  Folder folder;
  std::vector<float> x{1, 2, 3, 4, 5, 6};
  std::vector<double> y{0.5};
  std::vector<uint8_t> b{1, 0, 1};
  std::vector<float> none;
  files::write_safetensors(folder.file("a.safetensors"),
                           {array_of("b", THALWEG_BOOL, {3}, b), array_of("x", THALWEG_F32, {2, 3}, x),
                            array_of("y", THALWEG_F64, {}, y), array_of("none", THALWEG_F32, {0, 7}, none)},
                           {{"format", "pt"}});
  auto file = files::read_safetensors(folder.file("a.safetensors"));
  EXPECT_EQ(file.content.metadata.at("format"), "pt");
  ASSERT_EQ(file.content.arrays.size(), 4u);
  const Array& read = file.content.at("x");
  EXPECT_EQ(read.dtype, thalweg_dtype(THALWEG_F32));
  EXPECT_EQ(read.shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(std::memcmp(read.data.data(), x.data(), 24), 0);
  EXPECT_EQ(file.content.at("y").shape, std::vector<int64_t>{});
  EXPECT_EQ(file.content.at("none").data.size(), 0u);
  for (const Array& a : file.content.arrays)  // every array is aligned to its elements
    EXPECT_EQ(size_t(a.data.data() - file.bytes.data()) % files::find_dtype(a.dtype)->bytes, 0u) << a.name;
  EXPECT_FALSE(std::filesystem::exists(folder.file("a.safetensors.partial")));
}

TEST(Safetensors, ReadsAHeaderWrittenByHand) {
  auto bytes = bytes_of(with_header(R"({"__metadata__":{"k":"v"},"q":{"dtype":"BF16","shape":[2,1],"data_offsets":[0,4]}}   )", "abcd"));
  auto content = files::parse_safetensors(bytes, "f");
  EXPECT_EQ(content.at("q").dtype, thalweg_dtype(THALWEG_BF16));
  EXPECT_EQ(std::memcmp(content.at("q").data.data(), "abcd", 4), 0);
  EXPECT_EQ(content.find("k"), nullptr);
}

TEST(Safetensors, RefusesByName) {
  auto entry = [](const std::string& body) { return with_header("{\"q\":{" + body + "}}", "01234567"); };
  auto good = [](const char* dtype, const char* shape, const char* offsets) {
    return std::string("\"dtype\":\"") + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":" + offsets;
  };
  EXPECT_EQ(safetensors_error(entry(good("F32", "[2]", "[0,8]"))), "");
  struct Bad {
    std::string file, text;
  };
  const Bad bad[] = {
      {"", "size, got 0 bytes"},
      {std::string(8, '\xff'), "header length, got 18446744073709551615"},
      {with_header("{}").substr(0, 9), "header length, got 2, expected 2 to 1"},
      {with_header("[]"), "starts with {"},
      {with_header("{\"q\":"), "expected a JSON object"},
      {with_header("{\"q\":{\"dtype\":\"\xff\"}}"), "expected a JSON object"},
      {with_header("{\"a\":{\"b\":{\"c\":{\"d\":1}}}}"), "nested too deep"},
      {with_header("{\"a\":" + std::string(100000, '[')), "nested too deep"},
      {with_header("{\"q\":3}"), "\"q\": got 3, expected an object"},
      {entry(good("F32", "[3]", "[0,8]")), "got 8 bytes, expected 12 (F32 [3])"},
      {entry(good("F32", "[1]", "[0,4]")), "size, got 8 bytes after the header, expected 4"},
      {entry(good("F32", "[1]", "[4,8]")), "bytes without an array"},
      {entry(good("F32", "[2]", "[8,0]")), "expected begin <= end <= 8"},
      {entry(good("F32", "[4]", "[0,16]")), "expected begin <= end <= 8"},
      {entry(good("F8_E5M2", "[8]", "[0,8]")), "dtype, got \"F8_E5M2\""},
      {entry(good("f32", "[2]", "[0,8]")), "dtype, got \"f32\""},
      {entry(good("F32", "[-2]", "[0,8]")), "shape, got -2, expected a whole number"},
      {entry(good("F32", "[2.0]", "[0,8]")), "shape, got 2.0"},
      {entry(good("F32", "[2]", "[0,8,9]")), "data_offsets, got [0,8,9]"},
      {entry(good("F32", "2", "[0,8]")), "shape, got 2, expected a list"},
      {entry(good("F32", "[4611686018427387904,4]", "[0,8]")), "fewer than 2^63 bytes"},
      {entry(good("F32", "[4294967296,4294967296,0]", "[0,0]")), "fewer than 2^63 bytes"},
      {entry(good("F32", "[18446744073709551615]", "[0,8]")), "shape, got 18446744073709551615"},
      {entry(good("F32", "[2]", "[0,8]") + ",\"x\":1"), "got member \"x\""},
      {entry("\"dtype\":\"F32\",\"shape\":[2]"), "data_offsets: missing"},
      {entry(good("F32", "[2]", "[0,8]") + ",\"dtype\":\"F32\""), "\"dtype\" is there twice"},
      {with_header(R"({"q":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"q":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})", "ab"), "\"q\" is there twice"},
      {with_header(R"({"q":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"k":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})", "abc"), "arrays overlap"},
      {with_header(R"({"__metadata__":{"a":1}})"), "__metadata__: \"a\", got 1"},
      {with_header(R"({"__metadata__":[]})"), "__metadata__, got []"},
  };
  for (const Bad& b : bad) {
    std::string error = safetensors_error(b.file);
    EXPECT_NE(error.find(b.text), std::string::npos) << "got: " << error << "\nexpected in it: " << b.text;
    EXPECT_EQ(error.substr(0, 3), "f: ");
  }
}

TEST(Safetensors, EveryCutAndEveryChangedByteIsReadOrRefused) {
  std::vector<float> x{1, 2, 3};
  std::vector<Array> arrays{array_of("x", THALWEG_F32, {3}, x)};
  auto header = files::safetensors_header(arrays, {{"a", "b"}});
  std::string good(reinterpret_cast<const char*>(header.data()), header.size());
  good.append(reinterpret_cast<const char*>(x.data()), 12);
  ASSERT_EQ(safetensors_error(good), "");
  for (size_t n = 0; n < good.size(); ++n) EXPECT_NE(safetensors_error(good.substr(0, n)), "") << n;
  EXPECT_NE(safetensors_error(good + "x"), "");
  for (size_t at = 0; at < header.size(); ++at)
    for (int value = 0; value < 256; ++value) {
      std::string changed = good;
      changed[at] = char(value);
      safetensors_error(changed);  // either way, without a fault of memory (sanitizer builds) or another exception
    }
}

TEST(Safetensors, WriterRefuses) {
  std::vector<float> x{1, 2};
  std::vector<Array> wrong{array_of("x", THALWEG_F32, {3}, x)};
  EXPECT_THROW(files::safetensors_header(wrong, {}), FileError);
  std::vector<Array> twice{array_of("x", THALWEG_F32, {2}, x), array_of("x", THALWEG_F32, {2}, x)};
  EXPECT_THROW(files::safetensors_header(twice, {}), FileError);
  std::vector<Array> not_utf8{array_of("\xff", THALWEG_F32, {2}, x)};
  EXPECT_THROW(files::safetensors_header(not_utf8, {}), FileError);
  EXPECT_THROW(files::write_safetensors("/nowhere/at/all.safetensors", {}), FileError);
  EXPECT_THROW(files::read_file("/nowhere/at/all"), FileError);
  EXPECT_THROW(files::read_file("/"), FileError);
}

std::string npy_file(const std::string& dict, const std::string& data, int version = 1) {
  std::string out = "\x93NUMPY";
  out += char(version);
  out += '\0';
  out += char(dict.size() & 0xff);
  out += char(dict.size() >> 8);
  if (version == 2) out += std::string(2, '\0');
  return out + dict + data;
}

TEST(Npy, WritesWhatItReads) {
  Folder folder;
  std::vector<double> x{1, 2, 3, 4, 5, 6};
  files::write_npy(folder.file("x.npy"), array_of("", THALWEG_F64, {2, 3}, x));
  auto file = files::read_npy(folder.file("x.npy"));
  EXPECT_EQ(file.array.shape, (std::vector<int64_t>{2, 3}));
  EXPECT_TRUE(file.array.stride.empty());
  EXPECT_EQ(std::memcmp(file.array.data.data(), x.data(), 48), 0);
  EXPECT_EQ((file.bytes.size() - 48) % 64, 0u);  // as NumPy aligns it
  std::vector<uint16_t> bf{0};
  EXPECT_THROW(files::write_npy(folder.file("y.npy"), array_of("", THALWEG_BF16, {1}, bf)), FileError);
}

TEST(Npy, ReadsOrdersAndVersions) {
  std::string data(24, 'x');
  auto c = files::parse_npy(bytes_of(npy_file("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }\n", data)), "f");
  EXPECT_TRUE(c.stride.empty());
  auto bytes = bytes_of(npy_file("{\"shape\": (2, 3), \"fortran_order\": True, \"descr\": \"<f4\"}", data, 2));
  auto f = files::parse_npy(bytes, "f");
  EXPECT_EQ(f.stride, (std::vector<int64_t>{1, 2}));
  auto scalar = files::parse_npy(bytes_of(npy_file("{'descr':'<i8','fortran_order':False,'shape':()}", "12345678")), "f");
  EXPECT_TRUE(scalar.shape.empty());
  auto one = files::parse_npy(bytes_of(npy_file("{'descr':'|b1','fortran_order':True,'shape':(3,)}", "\1\1\1")), "f");
  EXPECT_EQ(one.dtype, thalweg_dtype(THALWEG_BOOL));
}

TEST(Npy, RefusesByName) {
  struct Bad {
    std::string file, text;
  };
  const Bad bad[] = {
      {"", "expected a .npy file"},
      {npy_file("{'descr':'<f4','fortran_order':False,'shape':(1,)}", "1234", 3), "version, got 3.0"},
      {npy_file("{'descr':'>f4','fortran_order':False,'shape':(1,)}", "1234"), "big-endian"},
      {npy_file("{'descr':'|V2','fortran_order':False,'shape':(1,)}", "12"), "bfloat16"},
      {npy_file("{'descr':[('a','<f4')],'fortran_order':False,'shape':(1,)}", "1234"), "record"},
      {npy_file("{'descr':'<f4','fortran_order':False,'shape':(2,)}", "1234"), "got 4 bytes after the header, expected 8"},
      {npy_file("{'descr':'<f4','fortran_order':False,'shape':(1,)}", "12345"), "got 5 bytes"},
      {npy_file("{'descr':'<f4','fortran_order':False,'shape':(4)}", std::string(16, 'x')), "comma"},
      {npy_file("{'descr':'<f4','fortran_order':False,'shape':(-1,)}", ""), "whole number"},
      {npy_file("{'descr':'<f4','fortran_order':False,'shape':(4611686018427387904,4)}", ""), "fewer than 2^63"},
      {npy_file("{'descr':'<f4','fortran_order':False,'shape':(9223372036854775808,)}", ""), "below 2^63"},
      {npy_file("{'descr':'<f4','fortran_order':False}", ""), "expected descr, fortran_order and shape"},
      {npy_file("{'descr':'<f4','fortran_order':0,'shape':()}", "1234"), "True or False"},
      {npy_file("{'descr':'<f4','descr':'<f4','fortran_order':False,'shape':()}", "1234"), "got descr twice"},
      {npy_file("{'descr':'<f4','fortran_order':False,'shape':(),'x':1}", "1234"), "got member 'x'"},
      {npy_file("{'descr':'<f4", ""), "closing quote"},
      {npy_file("{'descr':'<f4','fortran_order':False,'shape':()} x", "1234"), "expected its end"},
      {npy_file("{'descr':'<f4','fortran_order':False,'shape':()}", "1234").substr(0, 20), "header length"},
  };
  for (const Bad& b : bad) {
    std::string error = npy_error(b.file);
    EXPECT_NE(error.find(b.text), std::string::npos) << "got: " << error << "\nexpected in it: " << b.text;
  }
  std::string good = npy_file("{'descr': '<f4', 'fortran_order': True, 'shape': (1, 2), }\n", "12345678");
  ASSERT_EQ(npy_error(good), "");
  for (size_t n = 0; n < good.size(); ++n) EXPECT_NE(npy_error(good.substr(0, n)), "") << n;
  for (size_t at = 0; at < good.size() - 8; ++at)
    for (int value = 0; value < 256; ++value) {
      std::string changed = good;
      changed[at] = char(value);
      npy_error(changed);
    }
}

struct Outcome {
  int code;
  std::string out, err;
};
Outcome tool(const std::vector<std::string>& args) {
  std::vector<const char*> argv{"thalweg"};
  for (const auto& a : args) argv.push_back(a.c_str());
  ::testing::internal::CaptureStdout();
  ::testing::internal::CaptureStderr();
  int code = tool::run_tool(int(argv.size()), argv.data());
  std::fflush(stdout);
  std::string out = ::testing::internal::GetCapturedStdout();
  return {code, out, ::testing::internal::GetCapturedStderr()};
}

void expect_refused(const std::vector<std::string>& args, const std::string& text) {
  Outcome o = tool(args);
  EXPECT_EQ(o.code, 2) << o.out << o.err;
  EXPECT_NE(o.err.find(text), std::string::npos) << "got: " << o.err << "\nexpected in it: " << text;
}

TEST(Tool, HelpVersionAndWrongUse) {
  EXPECT_EQ(tool({"--help"}).code, 0);
  EXPECT_NE(tool({"--help"}).out.find("Examples"), std::string::npos);
  EXPECT_NE(tool({"--version"}).out.find(thalweg_version()), std::string::npos);
  for (const char* sub : {"list", "explain", "verify", "bench", "profile", "compare", "run", "docs"}) EXPECT_EQ(tool({sub, "--help"}).code, 0) << sub;
  EXPECT_EQ(tool({}).code, 2);
  expect_refused({"nothing"}, "nothing");
  expect_refused({"verify", "nothing.fwd:f32"}, "nothing.fwd");
  expect_refused({"verify", "@nothing"}, "nothing");
  expect_refused({"bench"}, "expected CASE");
  std::string pass = tool::pass_name(*thalweg_pass_at(0));
  expect_refused({"run", "nosuch.fwd", "--in", "a", "--out", "b"}, "pass, got nosuch.fwd, expected one of: " + pass);
  for (const char* seconds : {"-1", "0", "nan", "inf", "x", ""})
    expect_refused({"bench", "@smoke", "--seconds", seconds}, std::string("--seconds: got ") + seconds + ", expected a number of seconds above 0");
  expect_refused({"verify", "@smoke", "--threads", "1025"}, "--threads: Value 1025 not in range");
  expect_refused({"run", pass, "--in", "a.safetensors", "--out", "b.safetensors", "--threads", "1025"}, "--threads: Value 1025 not in range");
}

TEST(Tool, VerifyRefusesWhatIsNoVerdict) {
  Folder folder;
  expect_refused({"verify", folder.file("")}, "got a directory, expected a case, a file of cases or @set");
  testing::Case c = testing::find_cases("@smoke").at(0);
  for (const char* size : {"B", "N", "M"})
    if (c.sizes.count(size)) c.sizes[size] = int64_t(1) << 40;
  for (const char* command : {"verify", "bench"}) {
    expect_refused({command, c.text()}, "memory, got a case of");
    EXPECT_EQ(tool({command, c.text()}).out.find("failed"), std::string::npos);
  }
}

// --out over a file of --in would lose the inputs, by whatever name it is reached.
TEST(Tool, RunKeepsItsInputs) {
  Folder folder;
  testing::Case c = testing::find_cases("@smoke").at(0);
  testing::Problem problem(c);
  std::vector<Array> arrays;
  for (const auto& [name, values] : problem.inputs()) {
    thalweg_tensor& t = problem.tensor(name);
    arrays.push_back({name, t.dtype, values.shape, {}, {static_cast<const std::byte*>(t.data), values.data.size() * thalweg_dtype_bytes(t.dtype)}});
  }
  std::string in = folder.file("in.safetensors"), link = folder.file("link.safetensors"), hard = folder.file("hard.safetensors");
  files::write_safetensors(in, arrays);
  std::filesystem::create_symlink(in, link);
  std::filesystem::create_hard_link(in, hard);
  auto before = files::read_file(in);
  for (const std::string& out : {in, link, hard, folder.file("./in.safetensors")})
    expect_refused({"run", tool::pass_name(*c.pass), "--in", in, "--out", out}, "--out, got " + out + ", expected another file than " + in + " of --in");
  EXPECT_EQ(files::read_file(in), before);
}

TEST(Tool, ListNamesEveryPassAndKernel) {
  Outcome text = tool({"list"}), json = tool({"list", "--json"});
  ASSERT_EQ(text.code, 0);
  tool::Json parsed = tool::Json::parse(json.out);
  int64_t passes = 0;
  for (int64_t i = 0; const thalweg_pass* pass = thalweg_pass_at(i); ++i, ++passes) {
    EXPECT_NE(text.out.find(pass->op), std::string::npos);
    for (int64_t k = 0; const char* name = pass->kernel_at(k, nullptr); ++k) {
      EXPECT_NE(text.out.find(name), std::string::npos) << name;
      EXPECT_EQ(parsed["passes"][size_t(i)]["kernels"][size_t(k)]["kernel"], name);
    }
  }
  EXPECT_EQ(int64_t(parsed["passes"].size()), passes);
}

TEST(Tool, RunHelpNamesEveryField) {
  for (int64_t i = 0; const thalweg_pass* pass = thalweg_pass_at(i); ++i) {
    Outcome o = tool({"run", tool::pass_name(*pass), "--help"});
    EXPECT_EQ(o.code, 0) << o.err;
    for (int64_t f = 0; f < pass->num_fields; ++f) EXPECT_NE(o.out.find(pass->fields[f].name), std::string::npos) << pass->fields[f].name;
    for (const std::string& entry : tool::words(pass->refused ? pass->refused : "", ';')) {
      std::string name = tool::words(entry.substr(0, entry.find(':')), ',').front();
      expect_refused({"run", tool::pass_name(*pass), "--in", "a.safetensors", "--out", "b.safetensors", "--" + name, "1"}, tool::refusal(*pass, name));
    }
    expect_refused({"run", tool::pass_name(*pass), "--in", "absent.safetensors", "--out", "b.safetensors"}, "absent.safetensors: cannot be opened");
    expect_refused({"run", tool::pass_name(*pass), "--in", "a.npy", "--out", "b.safetensors"}, "expected name=FILE.npy");
    expect_refused({"run", tool::pass_name(*pass), "--in", "a.txt", "--out", "b.safetensors"}, "expected FILE.safetensors");
  }
}

// What `run` writes is what the library computes: a problem's own inputs through files.
void expect_run_equals_call(const testing::Case& c) {
  Folder folder;
  testing::Problem problem(c);
  const thalweg_pass& pass = *c.pass;
  std::vector<Array> arrays;
  std::string want;
  bool plain = true;
  for (int64_t i = 0; i < pass.num_fields; ++i) {
    const thalweg_field& f = pass.fields[i];
    if (f.kind != THALWEG_TENSOR) {
      plain = plain && !c.has(f.name);
      continue;
    }
    thalweg_tensor& t = problem.tensor(f.name);
    if (t.dtype == THALWEG_NONE) continue;
    std::vector<int64_t> shape(t.shape, t.shape + t.rank);
    int64_t count = 1, stride = 1;
    for (int64_t n : shape) count *= n;
    for (size_t a = shape.size(); a-- > 0; stride *= shape[a]) plain = plain && (t.stride[a] == stride || shape[a] == 1);
    if (f.role != THALWEG_OUT)
      arrays.push_back({f.name, t.dtype, shape, {}, {static_cast<const std::byte*>(t.data), size_t(count) * thalweg_dtype_bytes(t.dtype)}});
    else if (f.optional || f.dtypes[0] != '=')
      want += std::string(want.empty() ? "" : ",") + f.name + "=" + thalweg_dtype_name(t.dtype);
  }
  if (!plain) return;  // options and layouts have their own tests
  files::write_safetensors(folder.file("in.safetensors"), arrays);
  std::vector<std::string> args{"run", tool::pass_name(pass), "--in", folder.file("in.safetensors"), "--out", folder.file("out.safetensors")};
  if (!want.empty()) args.insert(args.end(), {"--want", want});
  for (const auto& [name, size] : c.sizes) args.insert(args.end(), {"--size", name + "=" + std::to_string(size)});
  Outcome o = tool(args);
  ASSERT_EQ(o.code, 0) << c.text() << ": " << o.err;
  ASSERT_EQ(problem.call(), THALWEG_OK) << thalweg_last_error();
  auto out = files::read_safetensors(folder.file("out.safetensors"));
  for (const std::string& name : problem.outputs()) {
    const Array& got = out.content.at(name);
    thalweg_tensor& t = problem.tensor(name);
    ASSERT_EQ(got.dtype, t.dtype) << name;
    EXPECT_EQ(std::memcmp(got.data.data(), t.data, got.data.size()), 0) << c.text() << ": " << name;
  }
  for (const char* name : {"H", "D"}) {
    if (!c.sizes.count(name)) continue;
    std::string more = std::to_string(c.size(name) + 1), had = std::to_string(c.size(name));
    args.back() = std::string(name) + "=" + more;
    expect_refused(args, "--size " + std::string(name) + ": got " + more + ", expected " + had);
    args.back() = std::string(name) + "=x";
    expect_refused(args, "--size, got " + args.back() + ", expected NAME=N");
  }
}

TEST(Tool, RunEqualsACallOfTheLibrary) {
  for (const testing::Case& c : testing::find_cases("@smoke")) expect_run_equals_call(c);
}

TEST(Tool, VerifyWritesItsVerdict) {
  Folder folder;
  std::string name = testing::find_cases("@smoke").at(0).text();
  Outcome o = tool({"verify", name, "--out", folder.file("v.json")});
  EXPECT_EQ(o.code, 0) << o.out << o.err;
  auto bytes = files::read_file(folder.file("v.json"));
  tool::Json v = tool::Json::parse(std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
  EXPECT_EQ(v["verdict"], "passed");
  for (const char* member : {"criterion", "commit", "machine", "command", "date", "cases"}) EXPECT_TRUE(v.contains(member)) << member;
  int compared = 0;  // rows that this machine cannot run have no figures
  for (const tool::Json& row : v["cases"])
    for (const tool::Json& output : row["outputs"]) compared += output.contains("rms_ratio");
  EXPECT_GT(compared, 0);
  expect_refused({"verify", name + ",kernel=nothing"}, "kernel, got nothing, expected one of:");
}

TEST(Tool, BenchTimesWhatVerifiesAndRefusesTheRest) {
  Folder folder;
  testing::Case c = testing::find_cases("@smoke").at(0);
  Outcome o = tool({"bench", c.text(), "--seconds", "0.02", "--warm", "--threads", "1", "--json", folder.file("r.jsonl")});
  ASSERT_EQ(o.code, 0) << o.out << o.err;
  auto bytes = files::read_file(folder.file("r.jsonl"));
  tool::Json r = tool::Json::parse(std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
  for (const char* member : {"case", "kernel", "backend", "isa", "threads", "median_us", "spread", "gflops", "gbs", "roof", "roof_value",
                             "roof_share", "verified", "commit", "machine", "command", "date"})
    EXPECT_TRUE(r.contains(member)) << member;
  EXPECT_EQ(r["verified"], true);
  EXPECT_GT(r["median_us"].get<double>(), 0);
  EXPECT_EQ(tool({"compare", folder.file("r.jsonl"), folder.file("r.jsonl")}).code, 0);
  for (const testing::Case& each : testing::find_cases("@smoke")) {  // a row that does not take the case cannot verify
    testing::Case forced = each;
    for (int64_t i = 0; const char* row = each.pass->kernel_at(i, nullptr); ++i) {
      std::string text = tool::explain_text(each);
      forced.kernel = row;
      if (text.find(forced.kernel + ": runs") != std::string::npos || text.find(forced.kernel + ": accepts") != std::string::npos) continue;
      Outcome refused = tool({"bench", forced.text(), "--seconds", "0.02", "--json", folder.file("n.jsonl")});
      EXPECT_EQ(refused.code, 1) << refused.out;
      EXPECT_NE(refused.err.find("refused to time"), std::string::npos);
      EXPECT_EQ(std::filesystem::file_size(folder.file("n.jsonl")), 0u);
      return;
    }
  }
}

TEST(Tool, DocsFillsAndChecks) {
  Folder folder;
  std::string last;
  for (int64_t i = 0; const thalweg_pass* pass = thalweg_pass_at(i); ++i) {
    std::filesystem::create_directories(folder.file(std::string("thalweg/ops/") + pass->op));
    last = folder.file(std::string("thalweg/ops/") + pass->op + "/README.md");
    tool::write_text(last, "# x\n<!-- generated: arguments -->\n<!-- end -->\nkept\n<!-- generated: kernels -->\nold\n<!-- end -->\n");
  }
  EXPECT_EQ(tool({"docs", "--check", "--root", folder.file("")}).code, 1);
  EXPECT_EQ(tool({"docs", "--root", folder.file("")}).code, 0);
  EXPECT_EQ(tool({"docs", "--check", "--root", folder.file("")}).code, 0);
  auto bytes = files::read_file(last);
  std::string text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  EXPECT_NE(text.find("\nkept\n"), std::string::npos);
  EXPECT_EQ(text.find("\nold\n"), std::string::npos);
  size_t at = text.find("| option |");
  ASSERT_NE(at, std::string::npos);
  tool::write_text(last, text.replace(at, 3, "| 0"));
  Outcome o = tool({"docs", "--check", "--root", folder.file("")});
  EXPECT_EQ(o.code, 1);
  EXPECT_NE(o.out.find("\n-|"), std::string::npos) << o.out;
  EXPECT_NE(o.out.find("\n+|"), std::string::npos);
  tool::write_text(last, "# x\n");
  expect_refused({"docs", "--check", "--root", folder.file("")}, "got no line");
  expect_refused({"docs", "--root", folder.file("nowhere")}, "--root, got");
}

std::string record(const std::string& name, double us, bool verified, double spread = 0.01) {
  tool::Json r{{"case", name}, {"kernel", "k"}, {"threads", 2}, {"median_us", us}, {"spread", spread}, {"verified", verified}};
  return r.dump() + "\n";
}

TEST(Tool, CompareSaysFasterOrRefuses) {
  Folder folder;
  auto write = [&](const std::string& name, const std::string& text) {
    tool::write_text(folder.file(name), text);
    return folder.file(name);
  };
  std::string a = write("a", record("x:f32", 100, true) + record("y:f32", 10, true) + record("z:f32", 10, true));
  std::string b = write("b", record("x:f32", 50, true) + record("y:f32", 10.05, true) + record("w:f32", 1, true));
  Outcome o = tool({"compare", a, b});
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_NE(o.out.find("2.000"), std::string::npos) << o.out;
  EXPECT_NE(o.out.find("faster"), std::string::npos);
  EXPECT_NE(o.out.find("within spread"), std::string::npos);
  EXPECT_NE(o.out.find("only in " + a), std::string::npos);
  EXPECT_NE(o.out.find("only in " + b), std::string::npos);
  std::string not_verified = write("n", record("x:f32", 50, false));
  EXPECT_EQ(tool({"compare", a, not_verified}).code, 1);
  EXPECT_EQ(tool({"compare", not_verified, a}).code, 1);
  expect_refused({"compare", a, write("e", "")}, "got no results");
  expect_refused({"compare", a, write("j", "{")}, "j:1: got a line that is not a JSON object");
  expect_refused({"compare", a, write("m", "{\"case\":\"x\",\"threads\":1}")}, "median_us, got none");
  expect_refused({"compare", a, write("o", record("other", 1, true))}, "no case in common");
  expect_refused({"compare", a, write("z", record("x:f32", 0, true))}, "z:1: median_us, got 0, expected a number above 0");
  expect_refused({"compare", write("s", record("x:f32", -1, true)), a}, "s:1: median_us, got -1");
  std::string twice = record("y:f32", 5, true) + record("x:f32", 50, true) + record("x:f32", 60, true);
  expect_refused({"compare", a, write("d", twice)}, "d:3: got a second line of x:f32 @2 with kernel k, expected one");
  auto with_kernel = [](const std::string& kernel, double us) {
    tool::Json r = tool::Json::parse(record("x:f32,kernel=" + kernel, us, true));
    r["kernel"] = kernel;
    return r.dump() + "\n";
  };
  std::string rows = write("r", with_kernel("one", 10) + with_kernel("two", 30));
  o = tool({"compare", rows, write("q", with_kernel("two", 10) + with_kernel("one", 10))});  // each beside its own
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_NE(o.out.find("3.000"), std::string::npos) << o.out;
  EXPECT_NE(o.out.find("1.000"), std::string::npos) << o.out;
  expect_refused({"compare", a, folder.file("absent")}, "cannot be opened");
}

TEST(Tool, SpreadFallsWithSamplesAndIsZeroWithoutNoise) {
  EXPECT_EQ(tool::median({3, 1, 2}), 2);
  EXPECT_EQ(tool::median({4, 1, 2, 3}), 2.5);
  std::vector<double> few, many;
  for (int i = 0; i < 20; ++i) few.push_back(100 + i % 10);
  for (int i = 0; i < 2000; ++i) many.push_back(100 + i % 10);
  EXPECT_LT(tool::spread_of(many), tool::spread_of(few));
  EXPECT_EQ(tool::spread_of(std::vector<double>(20, 5.0)), 0);
}

}  // namespace
}  // namespace thalweg
