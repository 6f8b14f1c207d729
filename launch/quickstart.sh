#!/usr/bin/env bash
# Train a small model three times through a slow link, from a fresh checkout, and compare the times. See --help.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: launch/quickstart.sh [--force]

Installs the project into a virtual environment, downloads 5 MB of Shakespeare, and trains a small GPT-2 three
times with the same seed, in two CPU processes on a link of 100 Mbit/s: uncompressed, with gradients and weights in
4 bits, and with the fewest bytes (demo, sign weights). Then prints how long each run took to the same loss, and
draws it. Takes less than ten minutes on two CPU cores. Finished steps are not repeated.

Needs Python 3.11 or newer and g++. The link needs Linux, iproute2, procps and util-linux, and root or a kernel
that allows user network namespaces. Without them, the processes communicate through memory, and the table says so.
GPUs are not used, because the GPUs of one machine have no slow link between them.

  --force   train all runs again

environment:
  DS_COMPRESS_VENV   virtual environment to use (default: .venv in the project)
  PYTHON             interpreter that creates it (default: the newest python3 from 3.11 up)

Everything is written below .venv, data/ and runs/quickstart/.
TEXT
}

force=no
for argument in "$@"; do
    case "$argument" in
        --help | -h) usage; exit 0 ;;
        --force) force=yes ;;
        *) echo "error: unknown option $argument" >&2; usage >&2; exit 2 ;;
    esac
done

cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv="${DS_COMPRESS_VENV:-.venv}"
say() { printf '\n== %s\n' "$*"; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.13 python3.12 python3.11 python3}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "error: no Python 3.11 or newer found; install one, or name it: PYTHON=/path/to/python $0" >&2
    return 1
}

install() {
    local wanted marker="$venv/.deepspeed-compress-installed"
    wanted=$(cat pyproject.toml constraints.txt | sha256sum)
    if [[ -f "$marker" && "$(<"$marker")" == "$wanted" ]]; then
        return
    fi
    say "installing into $venv (a few minutes)"
    if [[ ! -x "$venv/bin/python" ]]; then
        local python
        python=$(find_python)
        "$python" -m venv "$venv"
    fi
    # Install torch first and alone, because DeepSpeed's setup needs it.
    "$venv/bin/python" -m pip install --quiet torch==2.13.0
    "$venv/bin/python" -m pip install --quiet -c constraints.txt -e ".[hf,plot]"
    echo "$wanted" >"$marker"
}

on_two_hosts() { python -m deepspeed_compress.tools.bench.hosts --hosts 2 --rate 100mbit -- "$@"; }

on_this_host() {
    local port
    port=$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
    torchrun --nnodes 1 --nproc_per_node 2 --master_port "$port" --no-python "$@"
}

# Set `start`, which starts a command twice; `link`, the name of the link; and `runs`, the directory for its runs.
choose_link() {
    local trouble
    if trouble=$(on_two_hosts true 2>&1); then
        start=on_two_hosts link="a link of 100 Mbit/s" runs=runs/quickstart/100mbit
    else
        start=on_this_host link="one machine's memory, no network" runs=runs/quickstart/unlimited
        echo "no link of 100 Mbit/s here: ${trouble##*error: }"
    fi
}

# train NAME STEPS: write $runs/NAME, with all output in $runs/NAME.log. Every fifth step is shown.
train() {
    local name=$1 steps=$2
    if [[ "$force" == yes ]]; then
        rm -rf "${runs:?}/$name"
    fi
    if [[ -f "$runs/$name/summary.json" ]]; then
        say "$name: finished already ($runs/$name)"
        return
    fi
    say "$name: $steps steps with configs/quickstart_$name.json"
    "$start" python launch/train_gpt.py --deepspeed_config "configs/quickstart_$name.json" --data data/shakespeare \
        --tokenizer runs/quickstart/tokenizer --model configs/models/gpt_2m.json --output-dir "$runs/$name" \
        --steps "$steps" --seq-len 64 --eval-every 10 --eval-batches 8 --log-every 1 --save-every 50 --resume --seed 1 2>&1 |
        tee "$runs/$name.log" | { grep --line-buffered -vE '^\[[^]]*\] \[(INFO|WARNING)\]|^[0-9]*[1-46-9]/' || true; }
}

install
export PATH="$PWD/$venv/bin:$PATH"
if [[ "$venv" == /* ]]; then
    export PATH="$venv/bin:$PATH"
fi
export DS_ACCELERATOR=cpu CUDA_VISIBLE_DEVICES='' OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# The first start compiles two extensions. A killed build leaves a lock, for which all later builds would wait.
TORCH_EXTENSIONS_DIR=$(cd "$venv" && pwd)/torch_extensions
export TORCH_EXTENSIONS_DIR
rm -f "$TORCH_EXTENSIONS_DIR"/*/lock

say "corpus"
python -m deepspeed_compress.training.data data/shakespeare
choose_link
mkdir -p "$runs"
train uncompressed 120
train int4 160
train wan 240

say "result"
python -m deepspeed_compress.tools.time_to_loss "$runs"/{uncompressed,int4,wan} \
    --title "a small GPT-2, two processes, $link" --picture runs/quickstart/time_to_loss.png
ds-compress report "$runs/int4" --baseline "$runs/uncompressed" --output runs/quickstart
echo "The picture is runs/quickstart/time_to_loss.png."
