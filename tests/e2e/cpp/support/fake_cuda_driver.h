// A libcuda.so.1 of one device whose memory is the host's. A stream's work is done, in its order and after the events that it waits
// for, when somebody waits for it, and not before.
#ifndef HEADWATER_TESTS_E2E_CPP_SUPPORT_FAKE_CUDA_DRIVER_H_
#define HEADWATER_TESTS_E2E_CPP_SUPPORT_FAKE_CUDA_DRIVER_H_

#include <cstddef>

extern "C" {

// This memory is the device's from now on.
void FakeCudaAddMemory(const void* data, size_t bytes, bool exportable = false);
// The copy after `count` more fails to be enqueued; negative: none does.
void FakeCudaFailCopyAfter(int count);
// Copies that were enqueued and that nobody has waited for.
int FakeCudaCopiesUnderWay();
// Does the work of a stream, whatever handle names it, and what that work waits for.
void FakeCudaRun(void* stream);
// The memory of a handle for other processes, which those can open that cuMemAlloc() has made.
const void* FakeCudaOpen(const void* handle);
}

#endif  // HEADWATER_TESTS_E2E_CPP_SUPPORT_FAKE_CUDA_DRIVER_H_
