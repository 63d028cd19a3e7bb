// A checkpoint's manifest. Input: an odd first byte means that the rest is the manifest's body, which gets its checksum; an even
// one that the rest is the whole file.
#include "server/checkpoint/manifest.h"

#include <string>

#include "server/model_files/strict_json.h"
#include "server/model_files/xxh3.h"
#include "tests/fuzz/support/json_file.h"
#include "tests/fuzz/support/target.h"

namespace headwater::fuzz {
namespace {

// As FormatManifest() would have written it.
std::string WithChecksum(const std::string& body) {
  const nlohmann::json value = ParseLeniently(body);
  if (!value.is_object()) return body;
  const std::string text = value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  model_files::Xxh3Hasher hasher;
  hasher.Update(text.data(), static_cast<int64_t>(text.size()));
  return R"({"checksum": ")" + hasher.HexDigest() + R"(", "manifest": )" + body + "}";
}

void CheckManifest(const checkpoint::Manifest& manifest) {
  const HeadSpec& spec = manifest.info.spec;
  FUZZ_CHECK(spec.vocab_size > 0 && spec.hidden_size > 0 && spec.initial_step >= 0 && spec.staging_slots >= 0);
  FUZZ_CHECK(manifest.info.step >= 0 && manifest.info.update_count >= 0);
  FUZZ_CHECK(manifest.info.sequence >= 0 && manifest.info.first_sequence >= 0);
  FUZZ_CHECK(!manifest.files.empty() && static_cast<int64_t>(manifest.files.size()) <= checkpoint::kMaxCheckpointFiles);
  int64_t row = 0;
  for (size_t i = 0; i < manifest.files.size(); ++i) {
    const checkpoint::ManifestFile& file = manifest.files[i];
    FUZZ_CHECK(file.name == checkpoint::ShardFileName(i, manifest.files.size()));
    FUZZ_CHECK(file.name.find('/') == std::string::npos);
    FUZZ_CHECK(file.bytes >= 0);
    FUZZ_CHECK(file.rows.vocab_start == row && file.rows.vocab_end > row);
    row = file.rows.vocab_end;
  }
  FUZZ_CHECK(row == spec.vocab_size);
}

}  // namespace

void CheckInput(InputReader input) {
  const bool whole = input.Byte() % 2 == 0;
  const std::string rest = input.Rest();
  const auto manifest = checkpoint::ReadManifest(MemoryFile(whole ? rest : WithChecksum(rest)));
  if (!manifest.ok()) return CheckRefusal(manifest.status());
  CheckManifest(*manifest);
  // Written again it says the same.
  const std::string text = checkpoint::FormatManifest(*manifest);
  const auto again = checkpoint::ReadManifest(MemoryFile(text));
  FUZZ_CHECK(again.ok(), std::string(again.status().message()));
  FUZZ_CHECK(checkpoint::FormatManifest(*again) == text);
  FUZZ_CHECK(checkpoint::FindSpecDifferences(manifest->info.spec, again->info.spec).empty());
}

}  // namespace headwater::fuzz
