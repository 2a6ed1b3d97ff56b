#ifndef FA_SRC_API_RECORDING_HPP_
#define FA_SRC_API_RECORDING_HPP_

#include <filesystem>
#include <span>
#include <vector>

#include "plan/kernel_spec.hpp"

namespace fa::api {

/// Appends to the file that FA_RECORD names, if any, that one of `specs` was asked for: a line of JSON, once a process.
/// Processes may share a file. One that cannot be written costs a warning.
void record_request(std::span<const plan::KernelSpec> specs);

/// What was recorded, each request once. Throws fa::Error: io for a file that cannot be read, invalid_argument with its
/// line for a request that is none of this version.
std::vector<plan::Alternatives> read_recording(const std::filesystem::path& file);

}  // namespace fa::api

#endif  // FA_SRC_API_RECORDING_HPP_
