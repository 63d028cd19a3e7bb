# The headers that most code reads, gRPC's and the generated ones above all, compiled once for the libraries and once for the tests.
if(NOT HEADWATER_PRECOMPILED_HEADERS)
  return()
endif()
set(CMAKE_PCH_WARN_INVALID OFF)
# Newer versions of GCC warn in more places, and it forgets with precompiled headers which code is a library's.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
  foreach(warning array-bounds stringop-overflow stringop-overread restrict maybe-uninitialized dangling-pointer)
    target_compile_options(headwater_build_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-error=${warning}>)
  endforeach()
endif()

set(HEADWATER_COMMON_HEADERS
  <algorithm> <array> <atomic> <chrono> <cmath> <cstdint> <cstring> <deque> <functional> <limits> <map> <memory> <mutex> <optional> <set>
  <string> <string_view> <thread> <unordered_map> <utility> <variant> <vector>
  <absl/status/status.h> <absl/status/statusor.h> <absl/strings/str_cat.h> <absl/synchronization/mutex.h> <absl/time/clock.h>
  <absl/time/time.h>)
set(libraries absl::status absl::statusor absl::strings absl::synchronization absl::time)
if(TARGET headwater_proto)
  list(APPEND HEADWATER_COMMON_HEADERS <grpcpp/grpcpp.h>)
  foreach(service head loss session)
    list(APPEND HEADWATER_COMMON_HEADERS ${PROJECT_BINARY_DIR}/proto/headwater/v1/${service}_service.grpc.pb.h)
  endforeach()
  list(APPEND libraries headwater_proto)
endif()

file(WRITE ${PROJECT_BINARY_DIR}/empty.cc "")
add_library(headwater_precompiled OBJECT ${PROJECT_BINARY_DIR}/empty.cc)
target_link_libraries(headwater_precompiled PRIVATE headwater_build_flags ${libraries})
target_precompile_headers(headwater_precompiled PRIVATE ${HEADWATER_COMMON_HEADERS})

if(HEADWATER_BUILD_TESTS)
  # A program, because it is compiled with -fPIE as the tests are.
  file(WRITE ${PROJECT_BINARY_DIR}/empty_program.cc "int main() { return 0; }\n")
  add_executable(headwater_precompiled_for_tests ${PROJECT_BINARY_DIR}/empty_program.cc)
  target_link_libraries(headwater_precompiled_for_tests PRIVATE headwater_build_flags ${libraries} GTest::gmock)
  target_precompile_headers(headwater_precompiled_for_tests PRIVATE ${HEADWATER_COMMON_HEADERS} <gmock/gmock.h> <gtest/gtest.h>)
  headwater_test_code(headwater_precompiled_for_tests)
endif()
