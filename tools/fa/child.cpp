#include "child.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <string>

#include <fa/error.hpp>

namespace fa::cli {
namespace {

std::string read_all(int descriptor) {
  std::string text;
  std::array<char, 65536> chunk{};
  for (;;) {
    const ssize_t count = read(descriptor, chunk.data(), chunk.size());
    if (count > 0) {
      text.append(chunk.data(), static_cast<std::size_t>(count));
    } else if (count == 0 || errno != EINTR) {
      return text;
    }
  }
}

void write_all(int descriptor, const std::string& text) {
  std::size_t done = 0;
  while (done < text.size()) {
    const ssize_t count = write(descriptor, text.data() + done, text.size() - done);
    if (count < 0 && errno != EINTR) {
      return;
    }
    done += count > 0 ? static_cast<std::size_t>(count) : 0;
  }
}

nlohmann::json outcome_of(const std::function<nlohmann::json()>& body) {
  try {
    return {{"result", body()}};
  } catch (const Error& error) {
    return {{"error", error.what()}, {"code", static_cast<int>(error.code())}};
  } catch (const std::exception& exception) {
    return {{"error", exception.what()}, {"code", static_cast<int>(ErrorCode::internal)}};
  }
}

[[noreturn]] void run_child(int descriptor, const std::function<nlohmann::json()>& body) {
  write_all(descriptor, outcome_of(body).dump());
  _exit(0);  // no handlers: they belong to the parent
}

}  // namespace

nlohmann::json run_in_child(const std::function<nlohmann::json()>& body) {
  std::fflush(nullptr);
  std::array<int, 2> ends{};
  if (pipe(ends.data()) != 0) {
    throw Error(ErrorCode::io, "pipe failed");
  }
  const pid_t child = fork();
  if (child < 0) {
    throw Error(ErrorCode::io, "fork failed");
  }
  if (child == 0) {
    close(ends[0]);
    run_child(ends[1], body);
  }
  close(ends[1]);
  const std::string text = read_all(ends[0]);
  close(ends[0]);
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  const nlohmann::json outcome = nlohmann::json::parse(text, nullptr, false);
  if (outcome.is_discarded()) {
    throw Error(ErrorCode::internal, "the measuring process ended without a result");
  }
  if (outcome.contains("error")) {
    throw Error(static_cast<ErrorCode>(outcome["code"].get<int>()), outcome["error"].get<std::string>());
  }
  return outcome["result"];
}

}  // namespace fa::cli
