# What `cmake --install` puts where. Three components are the contents of the wheels and are installed only by name: python, server and
# cuda (client/python, server/python and kernels/cuda/python have the packages).
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

if(HEADWATER_BUILD_CLIENT)
  # The C++ client: find_package(headwater) and headwater::client, or pkg-config. Its libraries are static.
  set(libraries headwater_client headwater_core headwater_proto headwater_row_chunk_wire headwater_machine)
  set_target_properties(headwater_client PROPERTIES EXPORT_NAME client)
  install(TARGETS ${libraries} headwater_kernels_api headwater_build_flags
    EXPORT headwater_targets
    ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
    INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
  install(DIRECTORY client/core/include/headwater client/cpp/include/headwater DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
  set(package ${CMAKE_INSTALL_LIBDIR}/cmake/headwater)
  install(EXPORT headwater_targets NAMESPACE headwater:: DESTINATION ${package})
  set(generated ${PROJECT_BINARY_DIR}/generated/install)
  file(CONFIGURE OUTPUT ${generated}/headwaterConfig.cmake @ONLY CONTENT [[
include(CMakeFindDependencyMacro)
find_dependency(Threads)
find_dependency(absl CONFIG)
find_dependency(Protobuf)  # module mode, before gRPC: its config file expects these targets
find_dependency(gRPC CONFIG)
find_dependency(OpenSSL)
include(${CMAKE_CURRENT_LIST_DIR}/headwater_targets.cmake)
]])
  write_basic_package_version_file(${generated}/headwaterConfigVersion.cmake COMPATIBILITY SameMinorVersion)
  # It may be installed elsewhere than where it is configured for.
  cmake_path(RELATIVE_PATH CMAKE_INSTALL_PREFIX BASE_DIRECTORY ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig OUTPUT_VARIABLE up)
  file(CONFIGURE OUTPUT ${generated}/headwater.pc @ONLY CONTENT [[
prefix=${pcfiledir}/@up@
libdir=${prefix}/@CMAKE_INSTALL_LIBDIR@
includedir=${prefix}/@CMAKE_INSTALL_INCLUDEDIR@

Name: headwater
Description: @PROJECT_DESCRIPTION@: the client
Version: @PROJECT_VERSION@
Requires: absl_cord absl_span absl_status absl_statusor absl_strings absl_synchronization absl_time grpc++ openssl protobuf
Cflags: -I${includedir}
Libs: -L${libdir} -lheadwater_client -lheadwater_core -lheadwater_proto -lheadwater_row_chunk_wire -lheadwater_machine -pthread -ldl
]])
  install(FILES ${generated}/headwaterConfig.cmake ${generated}/headwaterConfigVersion.cmake DESTINATION ${package})
  install(FILES ${generated}/headwater.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endif()

foreach(program headwaterd headwaterctl)
  if(TARGET ${program})
    install(TARGETS ${program} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
    install(TARGETS ${program} RUNTIME DESTINATION headwater_server/bin COMPONENT server EXCLUDE_FROM_ALL)
  endif()
endforeach()
if(TARGET headwater_cuda)
  # Beside the program.
  install(TARGETS headwater_cuda LIBRARY DESTINATION ${CMAKE_INSTALL_BINDIR})
  install(TARGETS headwater_cuda LIBRARY DESTINATION headwater_cuda13 COMPONENT cuda EXCLUDE_FROM_ALL)
endif()
