# shellcheck shell=bash disable=SC2034
# What tools/test.sh and tools/demo.sh share. To be sourced from the root of the project.

jobs=${JOBS:-$(nproc)}

say() { printf '\n== %s\n' "$*"; }

have_header() { [[ -e "/usr/include/$1" || -e "/usr/local/include/$1" ]]; }

missing_packages() {
  command -v cmake >/dev/null || echo cmake
  command -v ninja >/dev/null || echo ninja-build
  command -v g++ >/dev/null || command -v c++ >/dev/null || echo g++
  command -v readelf >/dev/null || echo binutils
  have_header spdlog/spdlog.h || echo libspdlog-dev
  have_header fmt/format.h || echo libfmt-dev
  have_header nlohmann/json.hpp || echo nlohmann-json3-dev
  have_header CLI/CLI.hpp || echo libcli11-dev
  have_header xxhash.h || echo libxxhash-dev
  have_header gtest/gtest.h || echo libgtest-dev
  have_header boost/context/fiber.hpp || echo libboost-context-dev
  # Headers of the CUDA driver API, 12.0 or later; where no toolkit lies in a usual place.
  compgen -G '/usr/local/cuda*/include/cuda.h' >/dev/null || have_header cuda.h || command -v nvcc >/dev/null ||
    echo nvidia-cuda-toolkit
}

# With apt-get, as root or through sudo; says what to install where it cannot.
apt_install() {  # apt_install PACKAGES...
  local sudo=()
  [[ $(id -u) == 0 ]] || sudo=(sudo)
  if ! command -v apt-get >/dev/null || { [[ $(id -u) != 0 ]] && ! command -v sudo >/dev/null; }; then
    echo "These packages (Debian names) are missing; please install them: $*" >&2
    return 1
  fi
  say "installing $*"
  "${sudo[@]}" apt-get update -qq
  DEBIAN_FRONTEND=noninteractive "${sudo[@]}" apt-get install -y -qq --no-install-recommends "$@"
}

install_packages() {
  local missing=()
  mapfile -t missing < <(missing_packages)
  ((${#missing[@]} == 0)) || apt_install "${missing[@]}"
}

# CPU seconds of this script and of all that it has waited for, in `cpu`: a machine that is busy with something else
# moves them less than its clock. Not printed, because $(...) would be a shell with times of its own.
read_cpu() {
  times >build/times
  cpu=$(awk '{ for (i = 1; i <= 2; ++i) { split($i, t, /[ms]/); sum += 60 * t[1] + t[2] } } END { printf "%d", sum }' \
    build/times)
}

# What a stage of its own took, beside the 30 minutes that it may take on two cores.
say_time() {  # say_time NAME
  local cpu
  read_cpu
  echo "$1: $SECONDS s by the clock, $((cpu / 2)) s of CPU time on each of two cores, of 1800 s"
}

has_gpu() { compgen -G '/dev/nvidia[0-9]*' >/dev/null && ldconfig -p | grep -q 'libcuda\.so\.1'; }

say_gpu() {
  if has_gpu; then
    echo "GPU tests: run"
  else
    echo "GPU tests: skipped, because there is no NVIDIA GPU with a driver on this machine"
  fi
}
