# libFuzzer programs over the parsers. Only what they need is built, and only that is instrumented: not the server, and not protobuf.
find_package(Python3 REQUIRED COMPONENTS Interpreter)
find_path(FUZZ_XXHASH_INCLUDE_DIR xxhash.h REQUIRED)
find_package(OpenSSL REQUIRED)
set(product ${PROJECT_SOURCE_DIR})
set(parser_sources
  ${product}/client/core/link/error.cc
  ${product}/client/core/rows/transfer/chunk_wire.cc
  ${product}/kernels/core/digest.cc
  ${product}/kernels/core/error.cc
  ${product}/kernels/core/head_spec.cc
  ${product}/kernels/core/loss_options.cc
  ${product}/kernels/core/planned_bytes.cc
  ${product}/kernels/core/types.cc
  ${product}/kernels/cuda/products/algorithm_cache.cc
  ${product}/proto/headwater/v1/row_chunk_wire.cc
  ${product}/proto/headwater/v1/term_codec.cc
  ${product}/server/checkpoint/checkpoint_store.cc
  ${product}/server/checkpoint/file_system.cc
  ${product}/server/checkpoint/manifest.cc
  ${product}/server/checkpoint/shard_files.cc
  ${product}/server/checkpoint/weights_reader.cc
  ${product}/server/heads/head_name.cc
  ${product}/server/model_files/file_source.cc
  ${product}/server/model_files/head_tensors.cc
  ${product}/server/model_files/safetensors.cc
  ${product}/server/model_files/strict_json.cc
  ${product}/server/observability/logging.cc
  ${product}/server/scheduler/waiting.cc
  ${product}/server/service/request/canonical_header.cc
  ${product}/server/service/request/chunk_codec.cc
  ${product}/server/service/request/field_check.cc
  ${product}/server/service/request/head_request.cc
  ${product}/server/service/request/loss_request.cc
  ${product}/server/service/access/token_file.cc
  ${product}/server/transport/descriptor_socket.cc
  ${product}/server/transport/region_registry.cc)

headwater_fuzz_protobuf(headwater_fuzz_proto
  headwater/v1/tensor.proto headwater/v1/error.proto headwater/v1/loss.proto headwater/v1/loss_service.proto
  headwater/v1/head_service.proto headwater/v1/session_service.proto tests/fuzz/fuzz.proto)
# Generated code is protobuf's, and most of what is to be compiled.
target_compile_options(headwater_fuzz_proto PRIVATE -fno-sanitize=all)
target_link_libraries(headwater_fuzz_proto PUBLIC gRPC::grpc++ protobuf::libprotobuf)
headwater_library(headwater_fuzz_messages
  SOURCES support/message_input.cc support/message_mutator.cc
  DEPS headwater_fuzz_proto)

# What everything here is compiled with, and finds.
add_library(headwater_fuzz_flags INTERFACE)
target_include_directories(headwater_fuzz_flags INTERFACE ${PROJECT_SOURCE_DIR}/client/core/include ${FUZZ_XXHASH_INCLUDE_DIR})
target_compile_options(headwater_fuzz_flags INTERFACE
  -fsanitize=fuzzer-no-link -fsanitize-coverage-ignorelist=${CMAKE_CURRENT_SOURCE_DIR}/coverage.ignore
  -fprofile-instr-generate -fcoverage-mapping)
target_link_libraries(headwater_fuzz_flags INTERFACE headwater_build_flags headwater_kernels_api headwater_fuzz_proto)
# They call an engine, which is not there: nothing here has its type.
set_source_files_properties(${product}/server/transport/region_registry.cc PROPERTIES
  COMPILE_OPTIONS -fno-sanitize=vptr)
add_library(headwater_fuzzed STATIC ${parser_sources})
target_link_libraries(headwater_fuzzed
  PUBLIC absl::cord absl::status absl::statusor absl::strings absl::str_format absl::synchronization absl::time xxhash
    OpenSSL::Crypto
  PRIVATE headwater_fuzz_flags)

# fuzz_program(NAME OBJECTS...): what the objects have need not come from the library.
function(fuzz_program name)
  add_executable(${name} ${ARGN})
  target_link_options(${name} PRIVATE -fsanitize=fuzzer -fprofile-instr-generate)
  target_link_libraries(${name} PRIVATE headwater_fuzz_flags headwater_fuzz_messages headwater_fuzzed)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/fuzz)
endfunction()

add_custom_target(fuzz_parsers)
add_custom_target(fuzz_planted)
foreach(target ${HEADWATER_FUZZ_PARSERS})
  add_library(fuzz_${target}_object OBJECT targets/${target}.cc)
  target_link_libraries(fuzz_${target}_object PRIVATE headwater_fuzz_flags)
  set(objects $<TARGET_OBJECTS:fuzz_${target}_object>)
  if(target STREQUAL "request")
    list(APPEND objects support/request_mutator.cc)
  endif()
  fuzz_program(fuzz_${target} ${objects})
  add_dependencies(fuzz_parsers fuzz_${target})
  # The same over a source with a bug in it (plant.py): what shows that the target finds one.
  set(planted ${CMAKE_CURRENT_BINARY_DIR}/planted/${target}.cc)
  add_custom_command(
    OUTPUT ${planted}
    COMMAND Python3::Interpreter ${CMAKE_CURRENT_SOURCE_DIR}/plant.py ${target} ${planted}
    DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/plant.py ${parser_sources}
    VERBATIM)
  fuzz_program(fuzz_${target}_planted ${objects} ${planted})
  add_dependencies(fuzz_planted fuzz_${target}_planted)
endforeach()
