// An error's metadata in a message.
#ifndef HEADWATER_PROTO_HEADWATER_V1_ERROR_METADATA_H_
#define HEADWATER_PROTO_HEADWATER_V1_ERROR_METADATA_H_

#include <google/protobuf/map.h>

#include <exception>
#include <map>
#include <memory>
#include <string>

namespace headwater::v1 {

// Puts `metadata` in the place of what is in `out`, the field of a message that is on no arena. Throws std::bad_alloc, and leaves
// `out` as it was: protobuf's map does not survive it where memory ends in it, its destructor reads what is not there. So it is
// filled apart, and left alone then.
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
