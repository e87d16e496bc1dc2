#!/usr/bin/env python3
"""Checks the documents against the tree. Python's standard library only.

    tests/docs_check.py [TOOL]

Without TOOL: every path named in a .md exists; links and anchors lead somewhere; code blocks marked
with a file equal that file; no path of one machine stands in the tree; environment variables are the
code's; operator READMEs have the fixed headings; the
tests that docs/attention-edges.md names exist; kernel files open with the contract header; tuning
notes are well formed and their evidence is committed; the index of notes is up to date.
With TOOL (the built `thalweg`): also `thalweg docs --check` (tables generated from the code) and
`bench/report.py --check` (docs/benchmarks.md).

Prints one line a fault, `file:line: what, got …, expected …`, and exits 1 when there is any.
"""
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
sys.dont_write_bytecode = True
import tuning_index  # noqa: E402

TEXT = {".md", ".h", ".cpp", ".c", ".py", ".sh", ".txt", ".cmake", ".json", ".jsonl", ".in", ".yml", ""}
SOURCE = (".h", ".cpp", ".c", ".py", ".sh", ".cmake", ".md", ".txt", ".in")
README_HEADINGS = ["Math", "Arguments", "Limits", "Kernels", "Numerics", "Performance", "Design notes", "References"]
CONTRACT = ["Math", "Shapes", "Takes", "Threads", "Vectors", "Tile", "Scratch", "Numerics", "Traps", "Measured"]
# What a build makes, and C's own headers.
NOT_IN_TREE = {"pass_table.cpp", "spec_table.cpp", "thalweg/thalweg.h", "stdint.h", "string.h"}
# Split so that this file does not hold what it looks for.
MACHINE_PATHS = re.compile(r"(?<![\w.$}])/(" + "|".join(["wo" + "rk", "fa" + "rm", "tm" + "p/[a-z]", "ro" + "ot", "ho" + "me/[a-z]"]) + r")\b")


class Faults:
    def __init__(self):
        self.count = 0

    def add(self, path, line, text):
        self.count += 1
        name = path.relative_to(ROOT) if isinstance(path, pathlib.Path) else path
        print(f"{name}:{line}: {text}" if line else f"{name}: {text}")


def tracked_files():
    """Files of the tree that git knows or would take; without git, all but build/."""
    try:
        names = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, check=True,
                               capture_output=True).stdout.decode().split("\0")
        paths = [ROOT / name for name in names if name]
    except (OSError, subprocess.CalledProcessError):
        paths = [p for p in ROOT.rglob("*") if ".git" not in p.parts and "build" not in p.relative_to(ROOT).parts]
    return [p for p in paths if p.is_file()]


def blocks_of(lines):
    """(first line number, info words, text lines) of every fenced block."""
    found, start = [], None
    for number, line in enumerate(lines, 1):
        fence = re.match(r"\s*```(.*)$", line)
        if fence and start is None:
            start, info, text = number, fence.group(1).split(), []
        elif fence:
            found.append((start, info, text))
            start = None
        elif start is not None:
            text.append(line)
    return found


def check_block(faults, path, number, info, text):
    """A block whose info string names a file, as in ```cpp examples/cpp/first_call.cpp, is that file."""
    if len(info) < 2:
        if path == ROOT / "README.md" and info[:1] in (["cpp"], ["c"], ["python"]):
            faults.add(path, number, f"code block, got no file, expected ```{info[0]} <file that is compiled by a test>")
        return
    source = ROOT / info[1]
    if not source.is_file():
        faults.add(path, number, f"code block's file, got {info[1]}, expected a file of the tree")
        return
    want = [line.rstrip() for line in source.read_text(encoding="utf-8").splitlines()]
    got = [line.rstrip() for line in text]
    if not any(want[i:i + len(got)] == got for i in range(len(want) - len(got) + 1)):
        faults.add(path, number, f"code block, got text that differs, expected consecutive lines of {info[1]}")


def slug(heading):
    """A heading's anchor as repository viewers make it."""
    text = re.sub(r"[`*\[\]]", "", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def check_link(faults, path, number, target):
    if re.match(r"[a-z]+:", target):
        return
    name, _, anchor = target.partition("#")
    file = (path.parent / name).resolve() if name else path
    if not file.exists():
        faults.add(path, number, f"link, got {target}, expected a file of the tree")
    elif anchor and file.suffix == ".md":
        headings = [slug(line.lstrip("#")) for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
        if anchor not in headings:
            faults.add(path, number, f"link, got {target}, expected a heading of {file.name}")


def path_words(line):
    """Words of a line that may be paths; none that holds a placeholder."""
    for word in re.findall(r"[\w.+\-/<>*{}…@:$~]+", line):
        word = re.sub(r":\d+(-\d+)?$", "", word.rstrip(".:,"))
        if not re.search(r"[<>*{}…@:$~]|^\.", word) and word not in NOT_IN_TREE:
            yield word


def check_paths(faults, path, lines, tops, names):
    for number, line in enumerate(lines, 1):
        for word in path_words(re.sub(r"\]\([^)]*\)", "]", line)):
            first = word.split("/")[0]
            if "/" in word and first in tops and first != "build":
                if not (ROOT / word).exists() and not (path.parent / word).exists():
                    faults.add(path, number, f"path, got {word}, expected one that exists")
            elif "/" not in word and word.endswith(SOURCE) and len(pathlib.PurePath(word).stem) > 1:
                if word not in names:
                    faults.add(path, number, f"file name, got {word}, expected one of the tree")
        for target in re.findall(r"\]\(([^)\s]+)\)", line):
            check_link(faults, path, number, target)


def check_markdown(faults, files):
    tops = {p.relative_to(ROOT).parts[0] for p in files}
    names = {p.name for p in files}
    for path in files:
        if path.suffix == ".md":
            lines = path.read_text(encoding="utf-8").splitlines()
            check_paths(faults, path, lines, tops, names)
            for block in blocks_of(lines):
                check_block(faults, path, *block)


def check_machine_paths(faults, files):
    for path in files:
        if path.suffix in TEXT and path.name != "LICENSE":
            for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
                hit = MACHINE_PATHS.search(line)
                if hit:
                    faults.add(path, number, f"path of one machine, got {hit.group(0)}, expected none")


def check_environment(faults, files):
    """The library's and the scripts' variables are in README.md, and README.md names no others."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    told = set(re.findall(r"^\| `(THALWEG_[A-Z_]+)`", readme, re.M))
    used = set()
    for path in files:
        if path.suffix in (".h", ".cpp", ".c", ".sh") and "tests" not in path.parts:
            text = path.read_text(encoding="utf-8")
            used |= set(re.findall(r'env\("(THALWEG_\w+)"', text)) | set(re.findall(r"\$\{(THALWEG_\w+):", text))
    for name in sorted(used - told):
        faults.add("README.md", 0, f"environment variables, got no row for {name}, expected one (the code reads it)")
    for name in sorted(told - used):
        faults.add("README.md", 0, f"environment variables, got {name}, expected only what the code reads")


def check_operators(faults):
    for folder in sorted((ROOT / "thalweg" / "ops").iterdir()):
        if not folder.is_dir():
            continue
        readme = folder / "README.md"
        lines = readme.read_text(encoding="utf-8").splitlines() if readme.exists() else []
        got = [line[3:].strip() for line in lines if line.startswith("## ")]
        if got != README_HEADINGS:
            faults.add(readme, 0, f"headings, got {got}, expected {README_HEADINGS}")
        for kernel in sorted(folder.glob("cpu_*.cpp")):
            check_contract(faults, kernel)


def check_edges(faults):
    """docs/attention-edges.md: items 1 to 34 in order, and every test and every comment of cases that it names exists."""
    path, number = ROOT / "docs" / "attention-edges.md", 0
    shared = "".join(p.read_text(encoding="utf-8") for p in sorted((ROOT / "tests").glob("*.cpp")))
    operators = []
    for at, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")] if line.startswith("|") else []
        if cells[:1] == ["edge"]:
            operators = cells[1:]
        if not cells or not cells[0].isdigit():
            continue
        number += 1
        if int(cells[0]) != number or len(cells) != 2 + len(operators):
            faults.add(path, at, f"row, got {line[:20]!r}, expected item {number} with a cell for each operator")
        for operator, cell in zip(operators, cells[2:]):
            folder = ROOT / "thalweg" / "ops" / operator
            tests = set(re.findall(r"^TEST\(\w+, (\w+)\)", (folder / "test.cpp").read_text(encoding="utf-8"), re.M))
            marks = set(re.findall(r"\d+", " ".join(re.findall(r"^# edge ([\d, ]+):", (folder / "cases.txt").read_text(encoding="utf-8"), re.M))))
            names, cases = re.findall(r"`([\w.]+)`", cell), re.findall(r"\bedge (\d+)", cell)
            missing = [n for n in names if n not in tests and not all(f'"{part}"' in shared for part in n.split("."))]
            missing += [f"edge {n}" for n in cases if n not in marks]
            if missing or not (names or cases or cell.startswith("none: ")):
                faults.add(path, at, f"{operator}, got {missing or cell!r}, expected a test, cases (edge n) or 'none: ' and a reason")
    if number != 34:
        faults.add(path, 0, f"items, got {number}, expected 34")


def check_contract(faults, path):
    """The comment that opens a kernel file has the contract's items, in order."""
    header = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("//"):
            break
        header.append(line)
    items = [word for line in header if (word := line[3:].split(" ")[0]) in CONTRACT]
    if items != CONTRACT:
        faults.add(path, 1, f"contract header, got items {items}, expected {CONTRACT}")


def check_note(faults, path, operators, results):
    try:
        front, _, headings, body = tuning_index.read_note(path)
    except ValueError as fault:
        faults.add(path, 1, str(fault))
        return
    if tuple(front) != tuning_index.KEYS:
        faults.add(path, 1, f"front matter, got {' '.join(front)}, expected {' '.join(tuning_index.KEYS)}")
    if tuple(headings) != tuning_index.HEADINGS:
        faults.add(path, 1, f"headings, got {headings}, expected {list(tuning_index.HEADINGS)}")
    if front.get("operator") not in operators:
        faults.add(path, 1, f"operator, got {front.get('operator')}, expected one of {sorted(operators)}")
    if front.get("backend") not in ("cpu", "cuda", "none (Ascend, planned)"):
        faults.add(path, 1, f"backend, got {front.get('backend')}, expected cpu, cuda, or none (Ascend, planned)")
    if front.get("status") not in tuning_index.STATUSES:
        faults.add(path, 1, f"status, got {front.get('status')}, expected one of {list(tuning_index.STATUSES)}")
    evidence = tuning_index.evidence_of(front)
    if not evidence:
        faults.add(path, 1, "evidence, got none, expected results in bench/results")
    if evidence == ["none"] and front.get("backend") != "cpu":  # a rule that nothing here confirms says so
        if not any("not reproduced" in line for line in body):
            faults.add(path, 1, "evidence, got none, expected 'not reproduced' in the text")
        evidence = []
    for name in evidence:
        if name not in results:
            faults.add(path, 1, f"evidence, got {name}, expected [FILE#]CASE[#KERNEL] of a result in bench/results")
        elif results[name].get("verified") is not True:
            faults.add(path, 1, f"evidence, got {name}, which was not verified, expected a verified result")
    for heading, after in zip(headings, headings[1:] + [None]):
        start = body.index("## " + heading) + 1
        end = body.index("## " + after) if after else len(body)
        if not any(line.strip() for line in body[start:end]):
            faults.add(path, 1, f"{heading}, got no text, expected some")


def check_tuning(faults):
    operators = {p.name for p in (ROOT / "thalweg" / "ops").iterdir() if p.is_dir()}
    notes = tuning_index.notes()
    if not notes:
        faults.add("docs/tuning", 0, "notes, got none, expected at least one")
    results = tuning_index.results()
    before = faults.count
    for path in notes:
        check_note(faults, path, operators, results)
    if faults.count == before and tuning_index.main(["--check"]) != 0:
        faults.count += 1


def check_with_tool(faults, tool):
    for command in ([tool, "docs", "--check"], [sys.executable, str(ROOT / "bench" / "report.py"), "--check"]):
        done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode != 0:
            print(done.stdout + done.stderr, end="")
            faults.add(" ".join(command), 0, f"exit status, got {done.returncode}, expected 0")


def main(arguments):
    if len(arguments) > 1:
        print("docs_check: arguments, got more than one, expected at most the tool's path", file=sys.stderr)
        return 2
    faults = Faults()
    files = tracked_files()
    check_markdown(faults, files)
    check_machine_paths(faults, files)
    check_environment(faults, files)
    check_operators(faults)
    check_edges(faults)
    check_tuning(faults)
    if arguments:
        check_with_tool(faults, str(pathlib.Path(arguments[0]).resolve()))
    print(f"docs_check: {faults.count} faults in {sum(p.suffix == '.md' for p in files)} documents")
    return 1 if faults.count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
