#!/usr/bin/env bash
# Measures and tests on a machine with an NVIDIA device, from nothing, in one call of at most nine minutes, the most useful first
# (bench/gpu_steps.py, which takes the arguments):
#
#     OUT=results bench/gpu.sh
#     OUT=results bench/gpu.sh --only train-nvme copies
#
# OUT       folder for the page and the files of the steps, which are written as they go (default: bench/results)
# TORCH     what pip installs, such as torch==2.13.0 (default: a torch with CUDA that is here already, else the Makefile's)
# WHEELS    folder of wheels (and of libaio-dev*.deb, libxxhash-dev*.deb) to install from where there is no network
# PYTHON    interpreter to build upon, or to take as it is where it has all that is needed (default: .venv's, python3, python)
# DIR       folder on the drive to measure (default: here)
# LIMIT     seconds for everything (default: 530)
# REHEARSE  set it to run on the stand-in where there is no device
#
# Uses .venv when its torch sees a device and TORCH is not given; else makes build/gpu-venv, over the site-packages of an interpreter
# whose torch does, or with one from pip. What pip and apt-get cannot fetch is gone without: only Python packages that the tests
# import are needed. Where transformers cannot be had, generation and its rows are left out; accelerate's offload without accelerate.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
OUT=${OUT:-bench/results} DIR=${DIR:-.} LIMIT=${LIMIT:-530} VENV=build/gpu-venv
NEEDED="numpy psutil aiofiles xxhash msgspec rich shtab pytest hypothesis safetensors"
export PYTHONUNBUFFERED=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
SECONDS=0
mkdir -p "$OUT" build || exit 1

say() { printf '== %3d s  %s\n' "$SECONDS" "$*"; }
die() { say "$*"; exit 1; }
left() { echo $((LIMIT - SECONDS)); }

sees_device() { # an interpreter whose torch can use what is here
	command -v "$1" >/dev/null || return 1
	local sees='import torch, sys; sys.exit(not torch.cuda.is_available())'
	[[ -z ${REHEARSE:-} ]] || sees='import importlib.util, sys; sys.exit(not importlib.util.find_spec("torch"))'
	timeout 90 "$1" -c "$sees" 2>/dev/null
}
new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }
missing() { # of these packages
	"$py" - "$@" <<-'PY'
		import importlib.util, sys
		print(*(name for name in sys.argv[1:] if importlib.util.find_spec(name) is None))
	PY
}
# Off the network first where there is a folder of wheels; never another torch than the one that is there.
install() {
	local torch constraints=build/gpu-constraints.txt
	torch=$("$py" -c 'import torch; print("torch==" + torch.__version__)' 2>/dev/null)
	echo "$torch" >"$constraints"
	if [[ -n ${WHEELS:-} ]] && "$py" -m pip install -q --no-index --find-links "$WHEELS" "$@"; then return 0; fi
	timeout "${PATIENCE:-120}" "$py" -m pip install -q --retries 1 --timeout 15 -c "$constraints" "$@"
}

# Which Python, which torch

devices=$(nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null)
if [[ -z $devices && ! -e /dev/nvidiactl && -z ${REHEARSE:-} ]]; then
	say "no NVIDIA device on this machine: nothing to do"
	exit 0
fi
say "device: ${devices:-none}; $(nproc) cores; $(uname -srm)"
say "disk: $(df -h --output=source,fstype,avail "$DIR" | tail -1 | tr -s ' ')"

py='' base=''
for found in ${PYTHON:-} python3 python python3.14 python3.13 python3.12 python3.11 python3.10; do
	new_enough "$found" && base=$found && break
done
for found in ${PYTHON:-} "$PWD/.venv/bin/python" "$PWD/$VENV/bin/python"; do
	if [[ -z ${TORCH:-} ]] && sees_device "$found"; then
		py=$found
		[[ $found != "${PYTHON:-}" || -z $(missing $NEEDED) ]] && say "environment: $found" && break
		py=''
	fi
done
[[ -n $py || -n $base ]] || die "no Python 3.10 or newer here"

make_venv() {
	rm -rf "$VENV"
	"$base" -m venv "$@" "$VENV" && py=$PWD/$VENV/bin/python
}
apt_install() {
	local quick=(-o Acquire::Retries=0 -o Acquire::http::Timeout=10 -o Acquire::https::Timeout=10)
	timeout 60 apt-get "${quick[@]}" update -qq >/dev/null 2>&1 &&
		DEBIAN_FRONTEND=noninteractive timeout 90 apt-get "${quick[@]}" install -qqy --no-install-recommends "$@" >/dev/null 2>&1 ||
		say "apt-get could not install $*; going on without"
}
over_base() {
	make_venv --system-site-packages --without-pip || return 1
	# Where $base is a virtual environment itself, its packages are not the system's: name them.
	"$base" -c 'import sys; print(*(p for p in sys.path if p.endswith(("site-packages", "dist-packages"))), sep="\n")' |
		sed "s/.*/import site; site.addsitedir('&')/" >"$("$py" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
	"$py" -c 'import pip' 2>/dev/null || "$py" -m ensurepip >/dev/null 2>&1
	"$py" -c 'import torch' || return 1
	say "environment: $VENV, over the packages of $(command -v "$base")"
}
from_pip() {
	if ! make_venv >/dev/null 2>&1; then
		[[ $(id -u) == 0 ]] && command -v apt-get >/dev/null && apt_install python3-venv python3-dev
		make_venv || return 1
	fi
	say "environment: $VENV; installing $1"
	timeout 240 "$py" -m pip install -q --retries 1 --timeout 20 "$1" 'setuptools>=77' wheel || return 1
	sees_device "$py"
}

if [[ -z $py ]]; then
	pin=$(sed -n 's/^TORCH ?= *//p' Makefile)
	if [[ -n ${TORCH:-} ]]; then
		from_pip "$TORCH" || { say "pip did not bring $TORCH with a device"; py=''; }
	fi
	if [[ -z $py ]] && sees_device "$base"; then
		over_base || { say "could not build over the packages of $base"; py=''; }
	fi
	if [[ -z $py && -z ${TORCH:-} ]]; then
		from_pip "$pin" || py=''
	fi
	[[ -n $py ]] || die "no torch that sees a device: install one with CUDA, or name it with TORCH=..."
fi

# The rest of what is needed, and the libaio backend where it can be had

if [[ ! -e /usr/include/libaio.h || ! -e /usr/include/xxhash.h ]]; then
	shopt -s nullglob
	debs=(${WHEELS:+"$WHEELS"/libaio*.deb "$WHEELS"/libxxhash-dev*.deb})
	if ((${#debs[@]})); then
		for deb in "${debs[@]}"; do dpkg -x "$deb" build/gpu-root; done
		export CPATH="$PWD/build/gpu-root/usr/include${CPATH:+:$CPATH}"
		library=$(find "$PWD/build/gpu-root" -name libaio.a -printf '%h\n' -quit)
		export LIBRARY_PATH="$library${LIBRARY_PATH:+:$LIBRARY_PATH}"
	elif [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
		apt_install libaio-dev libxxhash-dev gcc libc6-dev
	fi
fi
absent=$(missing $NEEDED cffi) # which only the libaio backend needs
"$py" -c 'import sys, setuptools; sys.exit(int(setuptools.__version__.split(".")[0]) < 77)' 2>/dev/null || absent+=" setuptools>=77"
if [[ -n $absent ]]; then
	say "installing $absent"
	install $absent || for name in $absent; do # as many as can be had, while there is time
		(($(left) < 300)) || install "$name" || true
	done
fi
absent=$(missing $NEEDED)
[[ -z $absent ]] || die "these packages are needed and cannot be fetched: $absent; WHEELS=folder installs them from there"
absent=$(missing transformers accelerate)
if [[ -n $absent ]] && (($(left) > 420)); then
	say "installing $absent, which generation compares"
	PATIENCE=45 install $absent >/dev/null 2>&1 || say "going on without $absent"
fi

installed() { # this folder's package is what is imported elsewhere
	(cd / && "$py" -c 'import importlib.util; print(importlib.util.find_spec("tiered").origin)' 2>/dev/null) | grep -q "^$PWD/"
}
if ! installed; then
	make=("$py" -m pip install -q --no-deps --no-build-isolation --no-index -e .)
	[[ $py != "${PYTHON:-}" ]] || make=("$py" setup.py -q build_ext --inplace) # it is somebody's: nothing is installed there
	"${make[@]}" >build/gpu-install.log 2>&1 || say "not built, used from here: $(tail -1 build/gpu-install.log)"
	export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" # for what the tests start elsewhere, if it could not be installed
fi

# The steps, each with its share of what is left

name=$(tr '[:upper:]' '[:lower:]' <<<"${devices%%,*}" | sed -E 's/nvidia //; s/[^a-z0-9]+/-/g; s/^-|-$//g')
options=(--out "$OUT" --name "gpu_${name:-none}_$(date +%F)" --dir "$DIR" --seconds $(($(left) - 5)))
[[ -n ${REHEARSE:-} && -z $devices ]] && options+=(--device stand-in)
exec "$py" -m bench.gpu_steps "${options[@]}" "$@"
