// Arguments of an optimizer step: checked against the head's optimizer, and merged into its settings.
#ifndef HEADWATER_SERVER_HEADS_STEPS_APPLY_ARGUMENTS_H_
#define HEADWATER_SERVER_HEADS_STEPS_APPLY_ARGUMENTS_H_

#include "absl/status/status.h"
#include "headwater/kernels/engine.h"
#include "server/heads/head_name.h"
#include "server/heads/steps/step_calls.h"

namespace headwater::heads {

// kOptimizerNotConfigured; kInvalidCombination for an override of another optimizer's setting; kInvalidField for a value out of
// range. `name` and `spec` are the head's.
absl::Status CheckApply(const HeadName& name, const HeadSpec& spec, const ApplyArguments& arguments);

// The optimizer's settings with a step's overrides.
OptimizerSpec WithOverrides(OptimizerSpec optimizer, const ApplyArguments& arguments);

}  // namespace headwater::heads

#endif  // HEADWATER_SERVER_HEADS_STEPS_APPLY_ARGUMENTS_H_
