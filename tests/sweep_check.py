#!/usr/bin/env python3
"""`thalweg bench --sweep` times every combination of a row's choices, and goes on after one that hangs.

    sweep_check.py TOOL
"""
import json
import math
import subprocess
import sys


def run(*args):
    return subprocess.run([tool, *args], capture_output=True, text=True)


def row_that_runs(case):
    for line in run("explain", case).stdout.splitlines():
        if ": runs" in line:
            return line.split(":")[0].strip()


def case_with_choices():
    for each in json.loads(run("list", "--json").stdout)["passes"]:
        choices = {row["kernel"]: row["choices"] for row in each["kernels"] if row["choices"]}
        explained = run("explain", f"{each['operator']}.{each['pass']}@smoke").stdout if choices else ""
        for line in explained.splitlines():
            if line.startswith("case ") and choices.get(row_that_runs(line.split()[1])):
                case = line.split()[1]
                return case, choices[row_that_runs(case)]
    return None, None


tool = sys.argv[1]
case, choices = case_with_choices()
if not case:
    print("sweep: no row that runs on this machine declares choices")
    sys.exit(0)
sweep = run("bench", "--sweep", case, "--seconds", "0.01", "--json", "-")
records = [json.loads(line) for line in sweep.stdout.splitlines()]
combinations = math.prod(word.count("|") + 1 for word in choices.split())
assert sweep.returncode == 0, sweep.stderr
assert len(records) == combinations + 1, (len(records), combinations)
assert all(r["result"] in ("timed", "not taken") for r in records), records
assert sum(r["result"] == "timed" and r["median_us"] > 0 for r in records) >= 2, records
assert records[0]["choices"] == "(the row decides)"

hung = run("bench", "--sweep", case, "--seconds", "60", "--limit", "0.001", "--json", "-")
records = [json.loads(line) for line in hung.stdout.splitlines()]
assert hung.returncode == 1, hung
assert len(records) == combinations + 1
assert {r["result"] for r in records} <= {"hung", "not taken"} and records[0]["result"] == "hung", records
print(f"sweep: {case}: {combinations + 1} combinations")
