#!/usr/bin/env bash
# Installs the Debian packages that a goal needs and that are not there yet.
#
#   scripts/setup.sh demo|test|ascend
#
# Prints each package and its size first. Installs as root or with sudo; without rights it prints the
# exact apt line and exits 2. THALWEG_NO_INSTALL=1 installs nothing. When all is there it does nothing.
# What the Python tests need from PyPI goes to a virtual environment under build/ (scripts/python.sh).
set -euo pipefail
cd "$(dirname "$0")/.."

base=(g++ cmake make python3)
demo=(libopenblas-pthread-dev zlib1g-dev liblzma-dev libcli11-dev nlohmann-json3-dev libfmt-dev)
test=(libgtest-dev python3-venv python3-dev)
ascend=(python3-venv mlir-19-tools llvm-19)

fail() {
  echo "setup: $*" >&2
  exit 2
}

case "${1:-}" in
  demo) wanted=("${base[@]}" "${demo[@]}") ;;
  test) wanted=("${base[@]}" "${demo[@]}" "${test[@]}") ;;
  ascend) wanted=("${base[@]}" "${ascend[@]}") ;;
  *) fail "goal, got '${1:-}', expected demo, test or ascend" ;;
esac

if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
  [ "${THALWEG_NO_INSTALL:-}" = 1 ] ||
    fail "this is no Debian machine: install the like of ${wanted[*]} by hand, then set THALWEG_NO_INSTALL=1"
  exit 0
fi

is_installed() {
  local status
  status=$(dpkg-query -W -f='${db:Status-Status}\n' "$1" 2>/dev/null) && grep -qx installed <<<"$status"
}

missing=()
for package in "${wanted[@]}"; do
  is_installed "$package" || missing+=("$package")
done
[ ${#missing[@]} -gt 0 ] || exit 0

if [ "${THALWEG_NO_INSTALL:-}" = 1 ]; then
  echo "setup: not installed, since THALWEG_NO_INSTALL=1: ${missing[*]}"
  exit 0
fi

as_root=()
have_rights=yes
if [ "$(id -u)" != 0 ]; then
  if command -v sudo >/dev/null && { sudo -n true 2>/dev/null || [ -t 0 ]; }; then
    as_root=(sudo)
  else
    have_rights=no
  fi
fi

apt() {
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -o Acquire::Retries=3 \
    -o DPkg::Lock::Timeout=300 -o Dpkg::Use-Pty=0 "$@" </dev/null
}

# apt's package lists may be absent or old on a new machine.
updated=no
update_lists() {
  [ $updated = no ] || return 0
  updated=yes
  echo "setup: apt-get update"
  apt update -q=2 || echo "setup: apt-get update failed; trying with the lists that are there" >&2
}

all_known() {
  local package candidate
  for package in "${missing[@]}"; do
    candidate=$(LC_ALL=C apt-cache policy "$package" 2>/dev/null | sed -n 's/^ *Candidate: //p')
    [ -n "$candidate" ] && [ "$candidate" != "(none)" ] || return 1
  done
}

# What apt would install, dependencies included: a line "name version" each.
planned() {
  LC_ALL=C apt-get -s -o Debug::NoLocking=1 install --no-install-recommends "${missing[@]}" 2>/dev/null |
    sed -nE 's/^Inst ([^ ]+) (\[[^]]*\] )?\(([^ ]+) .*/\1 \3/p'
}

print_sizes() {
  local name version record
  printf '%-28s %-24s %12s %12s\n' package version download installed
  while read -r name version; do
    record=$(LC_ALL=C apt-cache show "$name=$version" 2>/dev/null || true)
    awk -v name="$name" -v version="$version" '
      /^Size:/ && !size { size = $2 }
      /^Installed-Size:/ && !disk { disk = $2 }
      END { printf "%-28s %-24s %9.1f MB %9.1f MB\n", name, version, size / 1e6, disk * 1024 / 1e6 }' <<<"$record"
  done
}

line="apt-get install --no-install-recommends -y ${missing[*]}"
if ! all_known; then
  [ $have_rights = yes ] && update_lists
fi
echo "setup: to install for 'make $1':"
plan=$(planned || true)
if [ -n "$plan" ]; then
  print_sizes <<<"$plan"
else
  printf '  %s (size not known: the package lists are empty or old)\n' "${missing[@]}"
fi

if [ $have_rights = no ]; then
  {
    echo "setup: neither root nor sudo here. Run this as root, then the same command again:"
    echo "  apt-get update && $line"
  } >&2
  exit 2
fi

log=build/setup.log
mkdir -p build
install_all() { apt install -q=2 --no-install-recommends -y "${missing[@]}" >>"$log" 2>&1; }
if ! install_all; then
  update_lists
  if ! install_all; then
    tail -n 20 "$log" >&2
    fail "the installation failed (all of it: $log); by hand: apt-get update && $line"
  fi
fi
for package in "${missing[@]}"; do
  is_installed "$package" || fail "$package: got no installation, expected one after: $line"
done
echo "setup: installed"
