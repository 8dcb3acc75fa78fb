// Streams that are captured, and the graphs that come of it: what is launched becomes a node.
//
// A launched graph runs its nodes one by one, in a seeded random order that keeps their
// dependencies; a dependency that is missing shows as a wrong result. What a GPU would refuse is an
// error here too.
#pragma once

#include <functional>
#include <string>

namespace emulator {

// Where `stream` is captured, the work of a kernel becomes a node of its graph, and true comes
// back.
bool record(void* stream, const std::string& kernel, const std::function<void()>& work);

// What was captured since the last call, in order, one a line: kernels, and "if" for an IF node.
std::string take_captured();

bool is_recorded(void* stream);

// Whether nothing but kernels is right ahead of the next node of a recorded stream.
bool follows_kernels(void* stream);

// cudaGraphSetConditional, from a kernel.
void set_condition(unsigned long long handle, unsigned value);

}  // namespace emulator
