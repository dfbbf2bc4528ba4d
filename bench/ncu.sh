#!/bin/sh
# Nsight Compute on one op:  bench/ncu.sh SUITE OP [CASE [BATCH]]  ->  build/ncu/OP.ncu-rep
# Each case runs twice inside the profiler's range; the second is warm. Clocks are left alone.
set -e
[ $# -ge 2 ] || { echo "usage: bench/ncu.sh SUITE OP [CASE [BATCH]]" >&2; exit 2; }
cd "$(dirname "$0")/.."
mkdir -p build/ncu
PYTHONPATH="$PWD:$PWD/python${PYTHONPATH:+:$PYTHONPATH}" \
exec ncu --profile-from-start off --nvtx --nvtx-include "profile_target/" \
  --set full --import-source yes --clock-control none \
  --kernel-name "regex:${2}" --force-overwrite --export "build/ncu/$2" \
  "${PYTHON:-python3}" -m bench "$1" --op "$2" ${3:+--case "$3"} ${4:+--batch "$4"} --profile
