# Where there is no libFuzzer the corpora are tests: each file is given to its target once. And rpc_sequence, where there is one for it.
headwater_fuzz_protobuf(headwater_fuzz_proto tests/fuzz/fuzz.proto)
target_link_libraries(headwater_fuzz_proto PUBLIC headwater_proto)
headwater_library(headwater_fuzz_messages
  SOURCES support/message_input.cc support/message_mutator.cc
  DEPS headwater_fuzz_proto)
# Alone, because its own test is all that the TSan build has of this.
headwater_library(headwater_fuzz_leak_check
  SOURCES support/leak_check.cc
  DEPS headwater_kernels_core)
headwater_library(headwater_fuzz_sequence
  SOURCES support/acknowledged.cc support/known_state.cc support/sequence_client.cc
  DEPS headwater_fuzz_leak_check headwater_fuzz_messages headwater_wire_test_support
  PRIVATE_DEPS absl::strings)

add_library(headwater_fuzz_corpus_test OBJECT corpus_test.cc)
target_link_libraries(headwater_fuzz_corpus_test PRIVATE headwater_build_flags GTest::gtest)
headwater_test_code(headwater_fuzz_corpus_test)
target_compile_definitions(headwater_fuzz_corpus_test PRIVATE HEADWATER_FUZZ_DIRECTORY="${CMAKE_CURRENT_SOURCE_DIR}")
headwater_test_code(headwater_fuzz_leak_check)
headwater_test_code(headwater_fuzz_messages)
headwater_test_code(headwater_fuzz_sequence)
# libFuzzer's runtime is a library, which clang's package brings.
find_program(FUZZ_CLANG clang)
set(fuzz_runtime "")
if(FUZZ_CLANG AND HEADWATER_SANITIZE MATCHES "address")
  execute_process(
    COMMAND ${FUZZ_CLANG} -print-file-name=libclang_rt.fuzzer-${CMAKE_SYSTEM_PROCESSOR}.a
    OUTPUT_VARIABLE fuzz_runtime OUTPUT_STRIP_TRAILING_WHITESPACE)
endif()
# A parser has no threads for TSan to watch; and what the `fuzz` preset is there for is ASan's look at it.
set(targets rpc_sequence)
if(NOT HEADWATER_SANITIZE MATCHES "thread" AND NOT EXISTS "${fuzz_runtime}")
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
    DEPS headwater_fuzz_messages headwater_fuzz_sequence headwater_service headwater_client)
  # chunk_response reads a header that is the client's own.
  target_include_directories(fuzz_${target}_test PRIVATE ${PROJECT_SOURCE_DIR}/client/core/include)
endforeach()
headwater_test(fuzz_leak_check_test LABELS unit SOURCES leak_check_test.cc DEPS headwater_fuzz_leak_check)
if(TARGET fuzz_algorithm_cache_test)
  # Of the CUDA engine, which is not built everywhere.
  target_sources(fuzz_algorithm_cache_test PRIVATE ${PROJECT_SOURCE_DIR}/kernels/cuda/products/algorithm_cache.cc)
endif()

# libFuzzer for the whole server, in gcc's build of it too. Built only when asked for.
if(EXISTS "${fuzz_runtime}")
  find_package(Python3 REQUIRED COMPONENTS Interpreter)
  set(planted ${CMAKE_CURRENT_BINARY_DIR}/planted/rpc_sequence.cc)
  add_custom_command(
    OUTPUT ${planted}
    COMMAND Python3::Interpreter ${CMAKE_CURRENT_SOURCE_DIR}/plant.py rpc_sequence ${planted}
    DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/plant.py ${PROJECT_SOURCE_DIR}/server/service/head/upload_store.cc
    VERBATIM)
  add_library(fuzz_rpc_sequence_objects OBJECT EXCLUDE_FROM_ALL targets/rpc_sequence.cc support/sequence_mutator.cc)
  target_link_libraries(fuzz_rpc_sequence_objects PRIVATE headwater_build_flags headwater_fuzz_sequence)
  foreach(name fuzz_rpc_sequence fuzz_rpc_sequence_planted)
    add_executable(${name} EXCLUDE_FROM_ALL $<TARGET_OBJECTS:fuzz_rpc_sequence_objects>)
    target_link_libraries(${name} PRIVATE headwater_build_flags headwater_fuzz_sequence ${fuzz_runtime})
    set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/fuzz)
  endforeach()
  target_sources(fuzz_rpc_sequence_planted PRIVATE ${planted})
endif()
