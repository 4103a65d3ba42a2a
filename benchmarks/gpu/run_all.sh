#!/usr/bin/env bash
# Everything that one GPU proves, in at most nine minutes: loads, smoke, then as many records as fit.
#
#   benchmarks/gpu/run_all.sh OUTDIR                      a collection
#   benchmarks/gpu/run_all.sh OUTDIR --repeat FILE...     the groups of these records, once more (for the noise floor)
#   benchmarks/gpu/run_all.sh OUTDIR --cpu                a dry run without a GPU: the same steps, less of each
#   further: --minutes M of the collection at most, --limit N records
#
# PYTHON names the interpreter (default: .venv's, else python3). KIT names a folder with what a bare machine lacks
# (README.md beside this file). Each step writes as it goes; OUTDIR/run.log tells how each went and what it printed, and
# after one that failed the others run all the same.
set -u

usage() { sed -n '2,11p' "$script" >&2; exit 2; }
script=$(realpath "$0")

fail() { echo "$*" >&2; exit 2; }
number() { [[ $2 =~ ^[0-9]+(\.[0-9]+)?$ ]] || fail "$1 needs a number, got '$2'"; }
trap 'echo interrupted >&2; exit 130' INT TERM

[ $# -ge 1 ] && [ "${1#--}" = "$1" ] || usage
mkdir -p "$1" 2>/dev/null && [ -w "$1" ] || fail "$1: not a folder that can be written"
out=$(realpath "$1"); shift
device=cuda minutes='' smoke=0.5 mebibytes=1024 total=540
limit=() repeat=()
while [ $# -gt 0 ]; do
    case $1 in
        --cpu) device=cpu smoke=0.1 mebibytes=32; shift ;;
        --minutes) number "$1" "${2:-}"; minutes=$2; shift 2 ;;
        --limit) number "$1" "${2:-}"; limit=(--limit "$2"); shift 2 ;;
        --repeat)
            shift
            while [ $# -gt 0 ] && [ "${1#--}" = "$1" ]; do
                [ -f "$1" ] || fail "--repeat $1: there is no such file"
                repeat+=("$(realpath "$1")"); shift
            done
            [ ${#repeat[@]} -gt 0 ] || usage ;;
        *) usage ;;
    esac
done
[ -n "$minutes" ] || minutes=$([ $device = cpu ] && echo 0.5 || echo 6.5)
if [ -n "${KIT:-}" ]; then
    [ -d "$KIT" ] || fail "KIT $KIT: there is no such folder"
    KIT=$(realpath "$KIT")
fi
case ${PYTHON:-} in */*) PYTHON=$(realpath -s "$PYTHON") ;; esac
cd "$(dirname "$script")/../.." || exit 1

if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ -x .venv/bin/python ] && PYTHON=.venv/bin/python
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
if [ -n "${KIT:-}" ]; then
    site=$(mktemp -d)
    "$PYTHON" benchmarks/gpu/unpack_kit.py "$KIT" "$site" || exit 1
    export PYTHONPATH="$site:$PYTHONPATH"
fi
# Drivers of containers lie where no loader looks.
driver=$(find /usr/local/nvidia /usr/lib -name 'libnvidia-ml.so.1' 2>/dev/null | head -n 1)
[ -n "$driver" ] && export LD_LIBRARY_PATH="$(dirname "$driver")${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
unset CUDA_MODULE_LOADING # lazy by default; eager loading of FBGEMM takes minutes

status=0 log="$out/run.log"
step() { # NAME SECONDS COMMAND...: runs a step under a limit and notes how it went
    local name=$1 seconds=$2 begun=$SECONDS code=0
    shift 2
    { echo "== $name"; timeout --foreground --kill-after=20 "$seconds" "$@"; } >>"$log" 2>&1 || code=$?
    echo "step $name: exit $code after $((SECONDS - begun)) s" | tee -a "$log"
    [ $code -eq 0 ] || { status=1; tail -n 6 "$log" >&2; }
}

{ date -u; uname -a; nvidia-smi; "$PYTHON" -m pip list; } >>"$log" 2>&1
records="$out/records.jsonl"
measure=("$PYTHON" -m torchrec_neuroshard measure)
step load_test 120 "$PYTHON" -m benchmarks.gpu.load_test --device "$device" --out "$out/load_test.jsonl"
step bandwidth 60 "${measure[@]}" bandwidth --device "$device" --mebibytes "$mebibytes" --out "$records"
compute=("${measure[@]}" compute --device "$device" ${limit[@]+"${limit[@]}"})
if [ ${#repeat[@]} -eq 0 ]; then
    step smoke 60 "${compute[@]}" --minutes "$smoke" --seed 1000 --out "$out/smoke.jsonl"
fi
left=$((total - SECONDS - 40)) # seconds that the collection may take, with its imports
[ $left -ge 30 ] || left=30
minutes=$("$PYTHON" -c "print(min($minutes, ($left - 20) / 60))") || exit 1
if [ ${#repeat[@]} -gt 0 ]; then
    step repeat "$left" "${compute[@]}" --minutes "$minutes" --out "$records" --repeat "${repeat[@]}"
else
    step collection "$left" "${compute[@]}" --minutes "$minutes" --seed 0 --out "$records"
fi
step summary 40 "$PYTHON" -m benchmarks.gpu.summary "$out"
[ ! -f "$out/summary.json" ] || cat "$out/summary.json"
exit $status
