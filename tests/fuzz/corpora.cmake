# Tests that give a target each file of its corpus once: rpc_sequence's always, a parser's where there is no libFuzzer.
set(stem ${CMAKE_CURRENT_BINARY_DIR}/tests/fuzz/fuzz)
add_custom_command(
  OUTPUT ${stem}.pb.cc ${stem}.pb.h
  COMMAND protobuf::protoc --cpp_out=${CMAKE_CURRENT_BINARY_DIR} -I ${PROJECT_SOURCE_DIR}/proto -I ${PROJECT_SOURCE_DIR} tests/fuzz/fuzz.proto
  DEPENDS fuzz.proto
  VERBATIM)
add_library(headwater_fuzz_proto STATIC ${stem}.pb.cc)
headwater_generated_code(headwater_fuzz_proto)
target_include_directories(headwater_fuzz_proto SYSTEM PUBLIC ${CMAKE_CURRENT_BINARY_DIR})
target_link_libraries(headwater_fuzz_proto PUBLIC headwater_proto)
find_package(nlohmann_json REQUIRED)
headwater_library(headwater_fuzz_messages
  SOURCES support/json_file.cc support/messages.cc
  DEPS headwater_fuzz_proto headwater_kernels_api nlohmann_json::nlohmann_json)

add_library(headwater_fuzz_corpus_test OBJECT corpus_test.cc)
target_link_libraries(headwater_fuzz_corpus_test PRIVATE headwater_build_flags GTest::gtest)
headwater_test_code(headwater_fuzz_corpus_test)
target_compile_definitions(headwater_fuzz_corpus_test PRIVATE HEADWATER_FUZZ_DIRECTORY="${CMAKE_CURRENT_SOURCE_DIR}")
# A parser has no threads for TSan to watch, and libFuzzer's program gives it to ASan.
set(targets rpc_sequence)
if(NOT HEADWATER_SANITIZE MATCHES "thread" AND NOT EXISTS "${HEADWATER_LIBFUZZER}")
  list(APPEND targets ${HEADWATER_FUZZ_PARSERS})
endif()
foreach(target ${targets})
  set(label unit)
  if(target STREQUAL "rpc_sequence")
    set(label integration)
  endif()
  headwater_test(fuzz_${target}_test
    LABELS ${label}
    SOURCES $<TARGET_OBJECTS:headwater_fuzz_corpus_test> targets/${target}.cc
    DEPS headwater_fuzz_messages headwater_wire_test_support headwater_service headwater_client absl::strings)
  # chunk_response reads a header that is the client's own.
  target_include_directories(fuzz_${target}_test PRIVATE ${PROJECT_SOURCE_DIR}/client/core/include)
endforeach()
if(TARGET fuzz_algorithm_cache_test)
  # Of the CUDA engine, which is not built everywhere.
  target_sources(fuzz_algorithm_cache_test PRIVATE ${PROJECT_SOURCE_DIR}/kernels/cuda/products/algorithm_cache.cc)
endif()
