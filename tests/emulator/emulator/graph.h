// Captured streams and their graphs: each launch becomes a node.
//
// A launched graph runs its nodes one by one, in a seeded random order that keeps their
// dependencies; a missing dependency shows as a wrong result. Calls that a GPU would refuse are
// errors here too.
#pragma once

#include <functional>
#include <string>

namespace emulator {

// If `stream` is captured, makes the work of a kernel a node of its graph and returns true.
bool record(void* stream, const std::string& kernel, const std::function<void()>& work);

// The nodes captured since the last call, in order, one a line: kernels, and "if" for an IF node.
std::string take_captured();

bool is_recorded(void* stream);

// Whether nothing but kernels is right ahead of the next node of a recorded stream.
bool follows_kernels(void* stream);

// cudaGraphSetConditional, from a kernel.
void set_condition(unsigned long long handle, unsigned value);

}  // namespace emulator
