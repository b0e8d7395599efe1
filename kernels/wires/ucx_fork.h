// Releases the sockets of a parent's UCX in a child of fork().
#pragma once

namespace qccl::ucx {

// Lets go of the sockets for which the epoll descriptor `epoll` waits, also by other epoll descriptors: in their places
// this process has /dev/null, so that UCX, if it closes one at the end, closes nothing else. The parent keeps them.
void let_go_of_sockets(int epoll);

}  // namespace qccl::ucx
