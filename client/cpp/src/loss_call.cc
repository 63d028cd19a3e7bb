#include "client/cpp/src/loss_call.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/core/link/notice.h"
#include "client/core/rows/tensor_exchanges.h"
#include "client/cpp/src/calls.h"
#include "client/cpp/src/convert.h"
#include "client/cpp/src/decision.h"
#include "headwater/kernels/return_if_error.h"

namespace headwater::client::internal {
namespace {

absl::Status CheckInput(const LossInput& input) {
  HEADWATER_RETURN_IF_ERROR(CheckRows("hidden", input.hidden));
  for (const RowsView& rows : input.teacher_hidden) {
    HEADWATER_RETURN_IF_ERROR(CheckRows("teacher_hidden", rows));
  }
  if (input.grad_hidden.empty()) return absl::OkStatus();
  if (!input.want_grad_hidden) {
    return InvalidView(v1::ERROR_REASON_INVALID_COMBINATION, "grad_hidden", "no memory, as no gradient was asked for",
                       absl::StrCat(input.grad_hidden.size(), " bytes"));
  }
  const int64_t expected = input.hidden.row_count * input.hidden.hidden_size * ElementBytes(input.grad_hidden_data_type);
  if (static_cast<int64_t>(input.grad_hidden.size()) != expected) {
    return InvalidView(v1::ERROR_REASON_DATA_LENGTH_MISMATCH, "grad_hidden", absl::StrCat(expected, " bytes"),
                       absl::StrCat(input.grad_hidden.size(), " bytes"));
  }
  return absl::OkStatus();
}

// A call that is under way, as its answer needs it.
struct LossCall {
  std::shared_ptr<Core> core;
  v1::MicroBatchHeader header;
  std::vector<std::shared_ptr<HeadHandle>> trained;
  TensorBuffer grad_hidden;
};

void NoteForm(const LossCall& call, ContributionForm form) {
  for (const std::shared_ptr<HeadHandle>& head : call.trained) {
    if (!head->ShouldWarnOfHeld(form, !call.header.late_token_factors())) continue;
    GiveNotice(call.core->options(),
               absl::StrCat("a micro-batch of ", head->name,
                            " found all staging slots taken by others that wait for their commit; the server keeps its rows and "
                            "computes them again at commit, a third more work. Create the head with more "
                            "HeadSpec::staging_slots, one for each micro-batch that waits at once"));
  }
}

absl::StatusOr<MultiResult> Read(LossCall& call, const Answer& answer) {
  const auto& summary = static_cast<const v1::MicroBatchSummary&>(*answer.message);
  absl::StatusOr<MultiResult> result = internal::FromProto(summary, call.header);
  if (!result.ok()) return result;
  result->grad_hidden = std::move(call.grad_hidden);
  result->attempt = answer.attempt;
  if (!call.header.has_micro_batch()) return result;
  NoteForm(call, result->form);
  if (result->state == ContributionState::kStaged) {
    ContributionKey key{call.core, {}, call.header.micro_batch(), answer.attempt};
    for (const std::shared_ptr<HeadHandle>& head : call.trained) {
      for (const v1::LossTerm& term : call.header.terms()) {
        if (term.head().head() != head->name || !term.head().has_step()) continue;
        key.heads.push_back(term.head());
        break;
      }
    }
    result->contribution.emplace(std::make_shared<const ContributionKey>(std::move(key)));
  }
  return result;
}

// ToResult makes the caller's result of the answer's.
template <typename Result, typename ToResult>
Future<Result> Begin(const std::shared_ptr<Core>& core, LossInput input, const CallOptions& options, ToResult to_result) {
  if (absl::Status status = CheckInput(input); !status.ok()) return Failed<Result>(status);
  CallMemory memory{.rows = input.hidden, .teachers = input.teacher_hidden, .result = {}, .cuda_stream = input.cuda_stream};
  const auto call = std::make_shared<LossCall>(LossCall{core, input.header, std::move(input.trained), {}});
  if (input.want_grad_hidden) {
    memory.result.data_type = input.grad_hidden_data_type;
    memory.result.row_count = input.hidden.row_count;
    memory.result.hidden_size = input.hidden.hidden_size;
    memory.result.memory = input.grad_hidden_memory;
    memory.result.data = input.grad_hidden.data();
    if (input.grad_hidden.empty()) {
      absl::StatusOr<TensorBuffer> own =
          MakeBuffer(input.grad_hidden_data_type, {input.hidden.row_count, input.hidden.hidden_size});
      if (!own.ok()) return Failed<Result>(own.status());
      call->grad_hidden = *std::move(own);
      memory.result.data = call->grad_hidden.data();
      memory.result.memory = Memory::kHost;
    }
  }
  return Start<Result>(core, HEADWATER_LOSS "ComputeLoss", std::move(input.header), DeadlineOf(*core, options), std::move(memory),
                       [call, to_result](const Answer& answer) -> absl::StatusOr<Result> {
                         HEADWATER_ASSIGN_OR_RETURN(MultiResult result, Read(*call, answer));
                         return to_result(std::move(result));
                       });
}

}  // namespace

Future<MultiResult> StartMulti(const std::shared_ptr<Core>& core, LossInput input, const CallOptions& options) {
  return Begin<MultiResult>(core, std::move(input), options, [](MultiResult result) { return result; });
}

Future<LossResult> StartLoss(const std::shared_ptr<Core>& core, LossInput input, const CallOptions& options) {
  return Begin<LossResult>(core, std::move(input), options, [](MultiResult result) {
    TermResult term = std::move(result.terms[0]);
    return LossResult{std::move(term), static_cast<MicroBatchResult&&>(result)};
  });
}

}  // namespace headwater::client::internal
