# Debian packages, by `cpack` in a tree configured for /usr (`make packages`): libkvrt0 is the shared
# library, libkvrt-dev the headers, the static archive, and the files for pkg-config and CMake,
# libkvrt-cuda0 the plugin for pools on CUDA devices, with kernels where there was an nvcc.
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME libkvrt)
set(CPACK_PACKAGE_VENDOR "libkvrt")
set(CPACK_PACKAGE_CONTACT "libkvrt developers <developers@libkvrt.invalid>")
set(CPACK_PACKAGING_INSTALL_PREFIX "${CMAKE_INSTALL_PREFIX}")
set(CPACK_PACKAGE_DIRECTORY "${PROJECT_BINARY_DIR}/packages")
set(CPACK_STRIP_FILES ON)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_COMPONENTS_ALL runtime development)
if(kvrt_installs_cuda)
    list(APPEND CPACK_COMPONENTS_ALL cuda)
endif()
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_RELEASE 1)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS_POLICY ">=")

set(kvrt_runtime_package "libkvrt${PROJECT_VERSION_MAJOR}")
set(CPACK_DEBIAN_RUNTIME_PACKAGE_NAME "${kvrt_runtime_package}")
set(CPACK_DEBIAN_RUNTIME_PACKAGE_SECTION libs)
set(CPACK_DEBIAN_RUNTIME_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_RUNTIME_DESCRIPTION "This package holds the shared library, which
pages, attends over, forks and evicts the keys and values of an engine's
sequences, and gives whole blocks and their bytes back.")

set(kvrt_same_version "(= ${PROJECT_VERSION}-${CPACK_DEBIAN_PACKAGE_RELEASE})")
set(CPACK_DEBIAN_RUNTIME_PACKAGE_SUGGESTS "libkvrt-cuda${PROJECT_VERSION_MAJOR}")

set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_NAME libkvrt-dev)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_DEPENDS "${kvrt_runtime_package} ${kvrt_same_version}")
set(CPACK_DEBIAN_DEVELOPMENT_DESCRIPTION "This package holds what it takes to build programs with it:
the headers, the static library, and what pkg-config and CMake need to find
them.")

# The library and its plugin are of one release. The driver, libcuda.so.1, is opened at run time.
set(CPACK_DEBIAN_CUDA_PACKAGE_NAME "libkvrt-cuda${PROJECT_VERSION_MAJOR}")
set(CPACK_DEBIAN_CUDA_PACKAGE_SECTION libs)
set(CPACK_DEBIAN_CUDA_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_CUDA_PACKAGE_DEPENDS "${kvrt_runtime_package} ${kvrt_same_version}")
set(CPACK_DEBIAN_CUDA_PACKAGE_SUGGESTS "libcuda1")
set(CPACK_DEBIAN_CUDA_DESCRIPTION "This package holds the plugin that the shared library
loads when a pool is made on a CUDA device: code for GPUs, and what drives
them. It needs the driver, libcuda.so.1, of the machine that it runs on.")

set(kvrt_package_components RUNTIME DEVELOPMENT)
if(kvrt_installs_cuda)
    list(APPEND kvrt_package_components CUDA)
endif()
foreach(component IN LISTS kvrt_package_components)
    string(TOLOWER "${component}" lower)
    install(FILES "${CMAKE_CURRENT_LIST_DIR}/copyright" COMPONENT ${lower}
        DESTINATION "${CMAKE_INSTALL_DATADIR}/doc/${CPACK_DEBIAN_${component}_PACKAGE_NAME}")
endforeach()

include(CPack)
