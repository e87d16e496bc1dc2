// The readers of the compiler's dump and memory files, on dumps that are checked in and on small ones made here.
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>
#include <stdexcept>

#include "thalweg/ascend/hivm.h"

namespace thalweg::ascend {
namespace {

std::string read(const std::string& name) {
  std::ifstream file(std::string(THALWEG_ASCEND_DATA) + "/dumps/" + name);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::string dump_of(const std::string& body) {
  return "// -----// IR Dump Before ConvertHIVMToStandard (convert-hivm-to-std) //----- //\nmodule attributes {a = \"b\"} {\n  func.func @k(%arg0: i64) {\n" + body +
         "    return\n  }\n}\n";
}

constexpr char kRow[] = "memref<64xf32, strided<[8], offset: ?>, #hivm.address_space<gm>>";

TEST(AscendDump, LocalDvIsRead) {
  Dump dump = parse_dump(read("dv_local.txt"), 64);
  ASSERT_EQ(dump.functions.size(), 2u);
  EXPECT_EQ(dump.workspace, 24576);
  const Function* cube = dump.find(true);
  const Function* vector = dump.find(false);
  ASSERT_TRUE(cube && vector);
  EXPECT_EQ(cube->name, "dv_local_mix_aic");
  EXPECT_EQ(cube->products, 2);
  EXPECT_EQ(cube->sum(false).bursts, 193);
  EXPECT_EQ(cube->sum(false).bytes, 32768);
  EXPECT_EQ(cube->sum(true).bursts, 65);
  EXPECT_EQ(cube->sum(true).bytes, 24576);
  EXPECT_EQ(vector->sum(false).bursts, 2);
  EXPECT_EQ(vector->sum(false).bytes, 8448);
  EXPECT_EQ(vector->sum(true).bursts, 1);
  EXPECT_EQ(vector->sum(true).bytes, 4096);
  EXPECT_EQ(vector->placed.at("ub"), 43584);
  EXPECT_EQ(cube->placed.at("cbuf"), 32768);
  EXPECT_EQ(cube->placed.at("cc"), 32768);
  EXPECT_EQ(cube->scalar_loops + vector->scalar_loops, 0);
}

TEST(AscendDump, GateIsRead) {
  Dump dump = parse_dump(read("kda_gate.txt"), 64);
  ASSERT_EQ(dump.functions.size(), 1u);
  const Function& gate = dump.functions[0];
  EXPECT_FALSE(gate.cube);
  EXPECT_EQ(gate.sum(false).bursts, 64);
  EXPECT_EQ(gate.sum(false).bytes, 16384);
  EXPECT_EQ(gate.sum(true).bursts, 64);
  EXPECT_EQ(gate.sum(true).bytes, 32768);
  EXPECT_EQ(gate.placed.at("ub"), 147492);
  EXPECT_EQ(gate.scalar_accesses, 0);  // A_log is read outside any loop
}

TEST(AscendDump, NeedIsTheFullestPoint) {
  EXPECT_EQ(parse_memory(read("dv_local_aiv.json")).at("ub"), 26112);
  std::map<std::string, int64_t> cube = parse_memory(read("dv_local_aic.json"));
  EXPECT_EQ(cube.at("cbuf"), 16384);
  EXPECT_EQ(cube.at("cc"), 16384);
}

TEST(AscendDump, StridedRowsAreBurstsAndLoopsMultiply) {
  std::string load = std::string("hivm.hir.load ins(%a : ") + kRow + ") outs(%b : memref<64xf32, #hivm.address_space<ub>>)\n";
  EXPECT_EQ(parse_dump(dump_of(load), 64).functions[0].sum(false).bursts, 64);
  std::string constants = "%c0 = arith.constant 0 : index\n%c1 = arith.constant 1 : index\n%c3 = arith.constant 3 : index\n";
  Dump loop = parse_dump(dump_of(constants + "scf.for %i = %c0 to %c3 step %c1 {\n" + load + "}\n"), 64);
  EXPECT_EQ(loop.functions[0].sum(false).bursts, 192);
  EXPECT_FALSE(loop.functions[0].transfers[0].per_pass);
  Dump data = parse_dump(dump_of(constants + "scf.for %i = %c0 to %arg0 step %c1 {\n" + load + "}\n"), 64);
  EXPECT_EQ(data.functions[0].sum(false).bursts, 64);
  EXPECT_TRUE(data.functions[0].transfers[0].per_pass);
}

// A cut tile counts as the whole one; a name means what it meant last.
TEST(AscendDump, CutTilesAreWhole) {
  const std::string whole = "memref<32x64xbf16, strided<[512, 1], offset: ?>, #hivm.address_space<gm>>", cut = "memref<?x64xbf16, strided<[512, 1], offset: ?>, #hivm.address_space<gm>>";
  const std::string view = "%s = memref.subview %a[0, 0] [%n, 64] [1, 1] : " + whole + " to " + cut + "\n";
  const std::string store = "hivm.hir.store ins(%b : memref<?x64xbf16, #hivm.address_space<ub>>) outs(%s : " + cut + ")\n";
  const Function::Sum sum = parse_dump(dump_of(view + store), 7).functions[0].sum(true);
  EXPECT_EQ(sum.bursts, 32);
  EXPECT_EQ(sum.bytes, 32 * 64 * 2);
  const std::string other = "%s = memref.cast %c : memref<64x64xbf16, #hivm.address_space<ub>> to memref<?x64xbf16, #hivm.address_space<ub>>\n";
  EXPECT_EQ(parse_dump(dump_of(view + other + store), 7).functions[0].sum(true).bursts, 7);
}

TEST(AscendDump, ScalarCodeInLoopsIsCounted) {
  std::string access = "%v = memref.load %a[%i] : memref<64xf32, #hivm.address_space<ub>>\n";
  EXPECT_EQ(parse_dump(dump_of(access), 64).functions[0].scalar_accesses, 0);
  Dump dump = parse_dump(dump_of("scf.for %i = %x to %y step %z {\n" + access + access + "}\n"), 64);
  EXPECT_EQ(dump.functions[0].scalar_accesses, 2);
  EXPECT_EQ(dump.functions[0].scalar_loops, 1);
}

TEST(AscendDump, BadTextIsRefusedByLine) {
  auto message = [](const std::string& text) {
    try {
      parse_dump(text, 64);
    } catch (const std::runtime_error& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  EXPECT_NE(message("nothing").find("expected one"), std::string::npos);
  EXPECT_NE(message("").find("IR Dump"), std::string::npos);
  std::string whole = read("dv_local.txt");
  EXPECT_NE(message(whole.substr(0, whole.size() / 2)), "");  // cut off
  EXPECT_NE(message(dump_of("hivm.hir.load ins(%a : memref<64xq9>) outs(%b)\n")).find("line 4"), std::string::npos);
  EXPECT_NE(message(dump_of("%1 = hivm.hir.pointer_cast(%c7) : memref<4xf32, #hivm.address_space<ub>>\n")).find("constant address"), std::string::npos);
  EXPECT_THROW(parse_memory("{"), std::runtime_error);
  EXPECT_THROW(parse_memory("{\"Record\": 3}"), std::runtime_error);
}

// Cut and mangled text is refused or read, and never crashes.
TEST(AscendDump, DamagedTextNeverCrashes) {
  std::string whole = read("dv_local.txt");
  for (size_t i = 0; i < whole.size(); i += 97) {
    std::string damaged = whole;
    damaged[i] = "<>{}%?\n "[i % 8];
    for (const std::string& text : {damaged, whole.substr(0, i)}) try {
        parse_dump(text, 64);
      } catch (const std::runtime_error&) {
      }
  }
}

}  // namespace
}  // namespace thalweg::ascend
