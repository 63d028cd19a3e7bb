// An error's metadata in a message.
#ifndef HEADWATER_PROTO_HEADWATER_V1_ERROR_METADATA_H_
#define HEADWATER_PROTO_HEADWATER_V1_ERROR_METADATA_H_

#include <google/protobuf/map.h>

#include <exception>
#include <map>
#include <memory>
#include <string>

namespace headwater::v1 {

// Replaces the content of `out`, the field of a message that is on no arena, by `metadata`. Throws std::bad_alloc and then leaves
// `out` unchanged. A separate map is filled first: after an allocation failure within a protobuf map, its destructor reads
// uninitialized memory.
inline void SetErrorMetadata(const std::map<std::string, std::string>& metadata,
                             google::protobuf::Map<std::string, std::string>* out) {
  auto filled = std::make_unique<google::protobuf::Map<std::string, std::string>>();
  try {
    for (const auto& [key, value] : metadata) (*filled)[key] = value;
  } catch (const std::exception&) {
    static_cast<void>(filled.release());
    throw;
  }
  out->swap(*filled);
}

}  // namespace headwater::v1

#endif  // HEADWATER_PROTO_HEADWATER_V1_ERROR_METADATA_H_
