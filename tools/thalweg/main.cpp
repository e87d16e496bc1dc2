#include "tools/thalweg/tool.h"

int main(int argc, char** argv) { return thalweg::tool::run_tool(argc, argv); }
