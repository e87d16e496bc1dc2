#!/usr/bin/env python3
"""What ptxas said of the fast CUDA rows: no spills, no stack, no products made to wait for each other.

    check_ptxas.py FOLDER     a build folder with *.cu.o.ptxas files (cmake/keep_ptxas.sh)

Files named sm90_*.cu are judged. Prints a table of every kernel with its registers. A kernel whose source says
"ptxas: <words>" in its header is no exception: there are none.
"""
import re
import sys
from pathlib import Path

REMARKS = re.compile(r"C75\d\d")  # products made to wait for each other (C7510, C7511, ...), setmaxnreg ignored (C7508)


def kernels(text):
    """(name, properties line, registers line) of every kernel in ptxas' output."""
    found = re.finditer(r"Compiling entry function '(\S+)' for 'sm_90a'(.*?)(?=Compiling entry function|\Z)", text, re.S)
    for match in found:
        yield match.group(1), match.group(2)


def number(pattern, text):
    match = re.search(pattern, text)
    return int(match.group(1)) if match else 0


def main():
    folder = Path(sys.argv[1])
    files = sorted(folder.rglob("sm90_*.cu.o.ptxas"))
    faults, rows = [], 0
    for file in files:
        text = file.read_text()
        for remark in sorted(set(REMARKS.findall(text))):
            faults.append(f"{file.name}: ptxas remark {remark}")
        for name, words in kernels(text):
            rows += 1
            stack = number(r"(\d+) bytes stack frame", words)
            spills = number(r"(\d+) bytes spill stores", words) + number(r"(\d+) bytes spill loads", words)
            registers = number(r"Used (\d+) registers", words)
            short = re.sub(r"^_ZN?\d*", "", name)[:90]
            print(f"{registers:4d} registers, {stack} bytes of stack, {spills} bytes of spills  {file.name[:-11]} {short}")
            if stack or spills:
                faults.append(f"{file.name}: {short}: {stack} bytes of stack, {spills} of spills, expected none")
    for fault in faults:
        print(f"check_ptxas: {fault}", file=sys.stderr)
    if not rows:
        print(f"check_ptxas: {folder}: got no kernel of a file sm90_*.cu, expected some", file=sys.stderr)
    return 1 if faults or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
