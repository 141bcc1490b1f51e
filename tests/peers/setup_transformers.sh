#!/usr/bin/env bash
# Makes DIR/run, a peer of `kvproof bench compare`: transformers with static batches, in an environment of its own.
#     bash tests/peers/setup_transformers.sh DIR
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
dir=$(mkdir -p "${1:?usage: setup_transformers.sh DIR}" && cd "$1" && pwd)
if ! "$dir/venv/bin/python" -c 'import transformers' 2>/dev/null; then
  python3 -m venv "$dir/venv"
  "$dir/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 gguf==0.19.0
fi
cat >"$dir/run" <<END
#!/usr/bin/env bash
exec env OMP_NUM_THREADS=$(nproc) HF_HUB_OFFLINE=1 "$dir/venv/bin/python" "$here/run_transformers.py" "\$@"
END
chmod +x "$dir/run"
echo "$dir/run is ready"
