#ifndef FA_SRC_TUNE_RECORD_HPP_
#define FA_SRC_TUNE_RECORD_HPP_

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace fa::tune {

/// Raised when the meaning of a record changes.
inline constexpr int kRecordSchema = 1;

/// How kernels are timed: alone on the GPU, the L2 cache full of something else, by events around the launches of a
/// call.
inline constexpr const char* kMethod = "cold-l2/1";

/// Everything that makes a record valid.
struct RecordKey {
  std::string templates;  ///< digest of the template set
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

struct Record {
  RecordKey key;
  std::string kernel;  ///< the winner: canonical text of a spec
  std::vector<RecordedTime> times = {};
};

/// JSON of one record, and back; nullopt with the reason in `*problem` for what is none.
std::string write_record(const Record& record);
std::optional<Record> read_record(std::string_view text, std::string* problem);

/// Records of one GPU model and template set, as the library ships them.
struct Table {
  std::string templates;
  std::string gpu;
  int multiprocessors = 0;
  std::string method = kMethod;
  struct Row {
    std::string problem;
    std::string kernel;
    double ratio = 1;  ///< to the default, when it was measured
  };
  std::vector<Row> rows;  ///< ascending by problem

  /// The kernel for `key`, of which the template set, the GPU and the method agree; empty when there is none.
  std::string_view find(const RecordKey& key) const;
};
std::string write_table(Table table);
std::optional<Table> read_table(std::string_view text, std::string* problem);

/// The tables that were built into the library (cache/tuned/*.json).
struct EmbeddedTable {
  std::string_view name;  ///< "nvidia-h200.json"
  std::string_view text;
};
std::span<const EmbeddedTable> embedded_tables();

/// Those of them that were measured with the templates of digest `templates`; others are passed over with a debug
/// message. Read once a process.
const std::vector<Table>& shipped_tables(const std::string& templates);

/// The usable ones among `tables`, which shipped_tables takes from the library.
std::vector<Table> usable_tables(std::span<const EmbeddedTable> tables, const std::string& templates);

}  // namespace fa::tune

#endif  // FA_SRC_TUNE_RECORD_HPP_
