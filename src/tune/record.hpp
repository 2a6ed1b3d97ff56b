#ifndef FA_SRC_TUNE_RECORD_HPP_
#define FA_SRC_TUNE_RECORD_HPP_

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace fa::tune {

/// Raised when the meaning of a record changes.
inline constexpr int kRecordSchema = 2;

/// How kernels are timed: alone on the GPU, the L2 cache full of something else, by events around the launches of a
/// call.
inline constexpr const char* kMethod = "cold-l2/1";

/// Everything that makes a record valid.
struct RecordKey {
  std::string templates;  ///< digest of the headers that the planner's own kernel includes
  std::string gpu;        ///< "NVIDIA H200"
  int multiprocessors = 0;
  std::string problem;  ///< bucket_text
  std::string method = kMethod;

  /// XXH3-128 over schema and fields, 32 hex digits: the record's name in its directory.
  std::string digest() const;
  friend bool operator==(const RecordKey&, const RecordKey&) = default;
};

/// What a candidate took, so that one new candidate costs one measurement.
struct RecordedTime {
  std::string kernel;  ///< canonical text of its spec
  double ratio = 0;    ///< to the default
  double milliseconds = 0;
  std::string refusal = {};  ///< why it was not timed
};

/// The kernel that won, and what it was compiled from: with other templates it is another kernel.
struct Winner {
  std::string kernel;     ///< canonical text of its spec
  std::string templates;  ///< digest of the headers that it includes

  friend bool operator==(const Winner&, const Winner&) = default;
};

struct Record {
  RecordKey key;
  Winner winner;
  std::vector<RecordedTime> times = {};
};

/// JSON of one record, and back; nullopt with the reason in `*problem` for what is none.
std::string write_record(const Record& record);
std::optional<Record> read_record(std::string_view text, std::string* problem);

/// Records of one GPU model, as the library ships them.
struct Table {
  std::string gpu;
  int multiprocessors = 0;
  std::string method = kMethod;
  struct Row {
    std::string problem;
    Winner winner;
    double ratio = 1;  ///< to the default, when it was measured
  };
  std::vector<Row> rows;  ///< ascending by problem

  /// The row for `key`, of which the GPU and the method agree; nullptr when there is none.
  const Row* find(const RecordKey& key) const;
};
std::string write_table(Table table);
std::optional<Table> read_table(std::string_view text, std::string* problem);

/// The tables that were built into the library (cache/tuned/*.json).
struct EmbeddedTable {
  std::string_view name;  ///< "nvidia-h200.json"
  std::string_view text;
};
std::span<const EmbeddedTable> embedded_tables();

/// Read once a process. What cannot be read is skipped with a debug message.
const std::vector<Table>& shipped_tables();

/// The readable ones among `tables`, which shipped_tables takes from the library.
std::vector<Table> readable_tables(std::span<const EmbeddedTable> tables);

}  // namespace fa::tune

#endif  // FA_SRC_TUNE_RECORD_HPP_
