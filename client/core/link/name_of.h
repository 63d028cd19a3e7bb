// Names of enumerators.
#ifndef HEADWATER_CLIENT_CORE_LINK_NAME_OF_H_
#define HEADWATER_CLIENT_CORE_LINK_NAME_OF_H_

#include <cstddef>

namespace headwater::client::internal {

// The name at the place of the value; `other`, or the first one, for a value that this library does not know.
template <typename Enum, size_t kCount>
const char* NameOf(Enum value, const char* const (&names)[kCount], const char* other = nullptr) {
  const auto place = static_cast<size_t>(value);
  if (place < kCount) return names[place];
  return other == nullptr ? names[0] : other;
}

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_LINK_NAME_OF_H_
