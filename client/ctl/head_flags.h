// The flags that describe a head, for `plan`, `create` and `load --create`.
#ifndef HEADWATER_CLIENT_CTL_HEAD_FLAGS_H_
#define HEADWATER_CLIENT_CTL_HEAD_FLAGS_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/ctl/output.h"
#include "headwater/client/types.h"

namespace headwater::ctl {

// Their names.
extern const std::vector<std::string> kHeadFlags;

// The type of that name; absent: there is none.
std::optional<client::DataType> DataTypeNamed(absl::string_view name);
// --data_type, or `otherwise` if it is not given. A usage error for another name than that of a type.
absl::StatusOr<client::DataType> DataTypeFromFlags(client::DataType otherwise);

// The specification that the flags give, and, where they give nothing, the model's config of --config, and else `defaults`: of
// tensors that are at hand, or with sizes of 0. `config_beside`: the config where --config is not given; empty: none.
//
// A flag that contradicts the config wins, and `output` notes it. A usage error for a name that is not known, a size that is
// missing or below 1, and optimizer settings without that optimizer; other ranges are the server's to check. INVALID_ARGUMENT for a
// config that does not fit the tensors, or has keys that this program does not know (unless --allow_unchecked); else as
// ReadModelHead().
absl::StatusOr<client::HeadSpec> HeadSpecFromFlags(const client::HeadSpec& defaults, const std::string& config_beside,
                                                   const Output& output);

}  // namespace headwater::ctl

#endif  // HEADWATER_CLIENT_CTL_HEAD_FLAGS_H_
