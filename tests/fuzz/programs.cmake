# libFuzzer programs, built only when asked for: fuzz_NAME, and fuzz_NAME_planted over a source with a known bug (plant.py). The parsers have
# an instrumented copy of the sources that they need. rpc_sequence drives the whole server, and is guided by what the calls are answered.
find_package(Python3 REQUIRED COMPONENTS Interpreter)
find_path(FUZZ_XXHASH_INCLUDE_DIR xxhash.h REQUIRED)
find_package(OpenSSL REQUIRED)
set(product ${PROJECT_SOURCE_DIR})
# Each of these has a planted copy, which takes the place of its object.
set(plantable_sources
  ${product}/client/core/rows/transfer/chunk_wire.cc
  ${product}/kernels/core/digest.cc
  ${product}/kernels/cuda/products/algorithm_cache.cc
  ${product}/proto/headwater/v1/row_chunk_wire.cc
  ${product}/server/checkpoint/manifest.cc
  ${product}/server/checkpoint/weights_reader.cc
  ${product}/server/heads/head_name.cc
  ${product}/server/model_files/safetensors.cc
  ${product}/server/model_files/strict_json.cc
  ${product}/server/service/access/token_file.cc
  ${product}/server/service/request/loss_request.cc
  ${product}/server/transport/descriptor_socket.cc)
set(parser_sources
  ${plantable_sources}
  ${product}/client/core/link/error.cc
  ${product}/kernels/core/error.cc
  ${product}/kernels/core/head_spec.cc
  ${product}/kernels/core/loss_options.cc
  ${product}/kernels/core/planned_bytes.cc
  ${product}/kernels/core/types.cc
  ${product}/proto/headwater/v1/term_codec.cc
  ${product}/server/checkpoint/checkpoint_store.cc
  ${product}/server/checkpoint/file_system.cc
  ${product}/server/checkpoint/shard_files.cc
  ${product}/server/heads/steps/step_ledger.cc
  ${product}/server/model_files/file_source.cc
  ${product}/server/model_files/head_tensors.cc
  ${product}/server/observability/logging.cc
  ${product}/server/scheduler/waiting.cc
  ${product}/server/service/request/canonical_header.cc
  ${product}/server/service/request/chunk_codec.cc
  ${product}/server/service/request/field_check.cc
  ${product}/server/service/request/head_request.cc
  ${product}/server/transport/region_registry.cc)
set_source_files_properties(${plantable_sources} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
# That of rpc_sequence, whose object comes from the server's library.
set_source_files_properties(${product}/server/service/head/upload_store.cc TARGET_DIRECTORY headwater_service PROPERTIES
  SKIP_UNITY_BUILD_INCLUSION ON)
# They call an engine, which is not there: nothing here has its type.
set_source_files_properties(${product}/server/transport/region_registry.cc PROPERTIES
  COMPILE_OPTIONS -fno-sanitize=vptr)

# What everything here is compiled with, and finds.
add_library(headwater_fuzz_flags INTERFACE)
target_include_directories(headwater_fuzz_flags INTERFACE ${PROJECT_SOURCE_DIR}/client/core/include ${FUZZ_XXHASH_INCLUDE_DIR})
target_compile_options(headwater_fuzz_flags INTERFACE
  -O1 -fsanitize=fuzzer-no-link -fsanitize-coverage-ignorelist=${CMAKE_CURRENT_SOURCE_DIR}/coverage.ignore
  -fprofile-instr-generate -fcoverage-mapping)
target_link_options(headwater_fuzz_flags INTERFACE -fprofile-instr-generate)
target_link_libraries(headwater_fuzz_flags INTERFACE headwater_build_flags headwater_kernels_api headwater_proto)
add_library(headwater_fuzzed STATIC EXCLUDE_FROM_ALL ${parser_sources})
target_link_libraries(headwater_fuzzed
  PUBLIC absl::cord absl::status absl::statusor absl::strings absl::str_format absl::synchronization absl::time xxhash
    OpenSSL::Crypto
  PRIVATE headwater_fuzz_flags)
if(HEADWATER_PRECOMPILED_HEADERS)
  target_precompile_headers(headwater_fuzzed PRIVATE ${HEADWATER_COMMON_HEADERS})
endif()

# fuzz_programs(NAME DEPENDENCY...): fuzz_NAME and fuzz_NAME_planted of targets/NAME.cc.
function(fuzz_programs name)
  add_library(fuzz_${name}_objects OBJECT EXCLUDE_FROM_ALL targets/${name}.cc support/libfuzzer.cc)
  target_link_libraries(fuzz_${name}_objects PRIVATE ${ARGN})
  set(planted ${CMAKE_CURRENT_BINARY_DIR}/planted/${name}.cc)
  add_custom_command(
    OUTPUT ${planted}
    COMMAND Python3::Interpreter ${CMAKE_CURRENT_SOURCE_DIR}/plant.py ${name} ${planted}
    DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/plant.py ${plantable_sources} ${product}/server/service/head/upload_store.cc
    VERBATIM)
  add_executable(fuzz_${name} EXCLUDE_FROM_ALL $<TARGET_OBJECTS:fuzz_${name}_objects>)
  # What its objects have need not come from a library.
  add_executable(fuzz_${name}_planted EXCLUDE_FROM_ALL $<TARGET_OBJECTS:fuzz_${name}_objects> ${planted})
  foreach(program fuzz_${name} fuzz_${name}_planted)
    target_link_options(${program} PRIVATE -fsanitize=fuzzer)
    target_link_libraries(${program} PRIVATE ${ARGN})
    set_target_properties(${program} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/fuzz)
  endforeach()
endfunction()

foreach(name ${HEADWATER_FUZZ_PARSERS})
  fuzz_programs(${name} headwater_fuzz_flags headwater_fuzz_messages headwater_fuzzed GTest::gtest)
  if(HEADWATER_PRECOMPILED_HEADERS)
    target_precompile_headers(fuzz_${name}_objects REUSE_FROM headwater_fuzzed)
  endif()
endforeach()
fuzz_programs(rpc_sequence headwater_build_flags headwater_fuzz_messages headwater_wire_test_support absl::strings)
