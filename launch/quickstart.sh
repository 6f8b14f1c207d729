#!/usr/bin/env bash
# From a fresh checkout to a trained model and a report: see --help.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: launch/quickstart.sh [--force]

Installs the project into a virtual environment, fetches 5 MB of Shakespeare, and trains a small GPT-2 twice
with the same seed: with uncompressed and with 4-bit gradients. Then prints both side by side and writes a
report. Needs Python 3.11 or newer and gcc; takes less than ten minutes on two CPU cores. With two or more
NVIDIA GPUs it trains on all of them, otherwise in two processes on the CPU. What is finished is not done again.

  --force   train both runs again

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
runs=runs/quickstart
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
    # torch comes first and alone: DeepSpeed's own setup looks for it.
    "$venv/bin/python" -m pip install --quiet torch==2.13.0
    "$venv/bin/python" -m pip install --quiet -c constraints.txt -e ".[hf,plot]"
    echo "$wanted" >"$marker"
}

count_gpus() {
    if command -v nvidia-smi >/dev/null; then
        nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true
    else
        echo 0
    fi
}

# Sets `ranks`: two processes on the CPU when there is nothing to communicate between GPUs.
choose_device() {
    ranks=$(count_gpus)
    if ((ranks < 2)); then
        echo "$ranks GPUs here: training in 2 processes on the CPU"
        ranks=2
        export DS_ACCELERATOR=cpu CUDA_VISIBLE_DEVICES=
        export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((($(nproc) + 1) / 2))}"
    fi
}

free_port() {
    python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

# train NAME CONFIG: writes $runs/NAME, with the launcher's full output in $runs/NAME.log
train() {
    local name=$1 config=$2
    if [[ "$force" == yes ]]; then
        rm -rf "${runs:?}/$name"
    fi
    if [[ -f "$runs/$name/summary.json" ]]; then
        say "$name: finished already ($runs/$name)"
        return
    fi
    say "$name: training with $config"
    deepspeed --num_gpus "$ranks" --master_port "$(free_port)" launch/train_gpt.py \
        --deepspeed_config "$config" --data data/shakespeare --tokenizer "$runs/tokenizer" \
        --model configs/models/gpt_2m.json --output-dir "$runs/$name" \
        --steps 200 --seq-len 128 --eval-every 50 --eval-batches 8 --save-every 100 --resume --seed 1 2>&1 |
        tee "$runs/$name.log" | { grep --line-buffered -vE '^\[[^]]*\] \[(INFO|WARNING)\]' || true; }
}

install
export PATH="$PWD/$venv/bin:$PATH"
if [[ "$venv" == /* ]]; then
    export PATH="$venv/bin:$PATH"
fi
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# DeepSpeed compiles an operation at start. A build that was killed leaves a lock on which all later ones would wait.
TORCH_EXTENSIONS_DIR=$(cd "$venv" && pwd)/torch_extensions
export TORCH_EXTENSIONS_DIR
find "$TORCH_EXTENSIONS_DIR" -name lock -delete 2>/dev/null || true
mkdir -p "$runs"

say "corpus"
python -m deepspeed_compress.training.data data/shakespeare
choose_device
train dense configs/quickstart_dense.json
train int4 configs/quickstart_int4.json

say "result"
ds-compress report "$runs/int4" --baseline "$runs/dense" --output "$runs"
echo "(Processes of one machine do not wait for a network: look at the bytes, not at the step time.)"
