#include "server/service/request/proto_encoding.h"

#include <algorithm>

#include "google/protobuf/util/time_util.h"
#include "proto/headwater/v1/spec_codec.h"

namespace headwater::service {
namespace {

using google::protobuf::util::TimeUtil;

HEADWATER_FIELDS(v1::StepTotals, heads::StepTotals, micro_batch_count, valid_token_count, loss_sum, token_weight_sum,
                 non_finite_row_count)
HEADWATER_FIELDS(v1::Step, heads::StepRecord, step, state)
HEADWATER_FIELDS(v1::VocabShard, VocabShard, vocab_start, vocab_end, device)
HEADWATER_FIELDS(v1::Head, heads::HeadInfo, state, weight_version, open_step, weight_checksum, restored_checkpoint)
HEADWATER_FIELDS(v1::Checkpoint, checkpoint::CheckpointInfo, step, total_bytes)

// Rounded up.
int64_t WholeSeconds(absl::Duration duration) { return absl::ToInt64Seconds(absl::Ceil(duration, absl::Seconds(1))); }

}  // namespace

void EncodeDuration(absl::Duration duration, google::protobuf::Duration* out) {
  // A clock that was set back must not give a negative duration.
  *out = TimeUtil::NanosecondsToDuration(absl::ToInt64Nanoseconds(std::max(duration, absl::ZeroDuration())));
}

void EncodeTime(absl::Time time, google::protobuf::Timestamp* out) {
  *out = TimeUtil::NanosecondsToTimestamp(absl::ToUnixNanos(time));
}

void EncodePlan(const MemoryPlan& plan, int64_t available_bytes, v1::MemoryPlan* out) {
  std::vector<MemoryPlan::Item> items = plan.items;
  std::stable_sort(items.begin(), items.end(), [](const auto& a, const auto& b) { return a.bytes > b.bytes; });
  for (const MemoryPlan::Item& item : items) {
    v1::MemoryItem* const encoded = out->add_items();
    encoded->set_purpose(item.purpose);
    encoded->set_total_bytes(item.bytes);
  }
  out->set_total_bytes(plan.total_bytes);
  out->set_available_bytes(available_bytes);
  out->set_token_chunk_rows(plan.token_chunk_rows);
}

void EncodeShards(const std::vector<VocabShard>& shards, v1::Head* out) {
  for (const VocabShard& shard : shards) WriteFields(shard, *out->add_shards());
}

void EncodeHead(const heads::HeadInfo& info, int64_t available_bytes, v1::Head* out) {
  out->set_name(info.name.ToString());
  EncodeHeadSpec(info.spec, out->mutable_spec());
  out->set_epoch(info.epoch.data(), info.epoch.size());
  for (const heads::Epoch& epoch : info.recovers_epochs) out->add_recovers_epochs(epoch.data(), epoch.size());
  WriteFields(info, *out);
  EncodeShards(info.shards, out);
  EncodePlan(info.plan, available_bytes, out->mutable_memory_plan());
  EncodeTime(info.create_time, out->mutable_create_time());
}

std::vector<v1::Checkpoint> EncodeCheckpoints(const checkpoint::CheckpointStore::Catalogue& catalogue) {
  std::vector<v1::Checkpoint> checkpoints;
  for (const checkpoint::CheckpointInfo& info : catalogue.newest_first) {
    v1::Checkpoint& checkpoint = checkpoints.emplace_back();
    checkpoint.set_checkpoint(info.name);
    WriteFields(info, checkpoint);
    if (info.save_time_s > 0) checkpoint.mutable_save_time()->set_seconds(info.save_time_s);
  }
  for (const std::string& name : catalogue.damaged) {
    v1::Checkpoint& checkpoint = checkpoints.emplace_back();
    checkpoint.set_checkpoint(name);
    checkpoint.set_damaged(true);
  }
  return checkpoints;
}

void EncodeTotals(const heads::StepTotals& totals, v1::StepTotals* out) { WriteFields(totals, *out); }

void EncodeStep(const heads::StepRecord& record, v1::Step* out) {
  WriteFields(record, *out);
  for (const auto& [id, micro_batch] : record.micro_batches) {
    v1::MicroBatchState* const encoded = out->add_micro_batches();
    encoded->set_micro_batch(id);
    // If only an attempt's announcement is there, that attempt.
    encoded->set_attempt(micro_batch.state == heads::ContributionState::kNone ? micro_batch.fence_attempt : micro_batch.attempt);
    encoded->set_state(static_cast<v1::ContributionState>(micro_batch.state));
    if (micro_batch.digest.has_value()) encoded->set_digest(micro_batch.digest->data(), micro_batch.digest->size());
    encoded->set_valid_token_count(micro_batch.counts.valid_token_count);
    encoded->set_factor(micro_batch.factor.factor);
    encoded->set_form(static_cast<v1::ContributionForm>(micro_batch.form));
  }
  EncodeTotals(record.Totals(), out->mutable_totals());
}

void EncodeLimits(const Limits& limits, v1::Limits* out) {
#define HEADWATER_ENCODE_Count(name) out->set_##name(limits.name);
#define HEADWATER_ENCODE_Bytes(name) out->set_##name(limits.name);
#define HEADWATER_ENCODE_Time(name) out->set_##name##_s(WholeSeconds(limits.name));
#define HEADWATER_ENCODE_LIMIT(unit, name, ...) HEADWATER_ENCODE_##unit(name)
  HEADWATER_LIMITS(HEADWATER_ENCODE_LIMIT)
#undef HEADWATER_ENCODE_LIMIT
#undef HEADWATER_ENCODE_Count
#undef HEADWATER_ENCODE_Bytes
#undef HEADWATER_ENCODE_Time
}

}  // namespace headwater::service
