# Cross-compiles for 64-bit Arm Linux on a Debian-like machine: -DCMAKE_TOOLCHAIN_FILE=cmake/aarch64.cmake.
# The stable ABI makes the headers of the machine's own Python do: pass -DPython_EXECUTABLE and -DPython_INCLUDE_DIR.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
find_program(CMAKE_C_COMPILER NAMES aarch64-linux-gnu-gcc aarch64-linux-gnu-gcc-12 REQUIRED)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64-static;-L;/usr/aarch64-linux-gnu)
