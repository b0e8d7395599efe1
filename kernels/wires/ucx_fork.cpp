#include "ucx_fork.h"

#include <fcntl.h>
#include <limits.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

namespace qccl::ucx {

namespace {

// A worker waits for its interfaces, and an interface for its sockets.
constexpr int kDeepest = 3;

struct Target {
  int descriptor;
  unsigned long inode;
};

// The descriptors for which an epoll descriptor waits (proc(5), fdinfo).
std::vector<Target> targets(int epoll) {
  std::ifstream lines("/proc/self/fdinfo/" + std::to_string(epoll));
  std::vector<Target> found;
  Target target;
  for (std::string line; std::getline(lines, line);)
    if (std::sscanf(line.c_str(), "tfd: %d events: %*x data: %*x pos:%*d ino:%lx", &target.descriptor, &target.inode) == 2)
      found.push_back(target);
  return found;
}

bool is_epoll(int descriptor) {
  char name[PATH_MAX] = {};
  const std::string path = "/proc/self/fd/" + std::to_string(descriptor);
  return ::readlink(path.c_str(), name, sizeof name - 1) > 0 && !std::strcmp(name, "anon_inode:[eventpoll]");
}

void replace_sockets(int epoll, int null, int depth) {
  for (const Target& target : targets(epoll)) {
    struct stat status = {};
    // The number may be another file's meanwhile: where a child lives, epoll does not forget what its parent has closed.
    if (::fstat(target.descriptor, &status) || status.st_ino != target.inode) continue;
    if (S_ISSOCK(status.st_mode)) {
      ::dup3(null, target.descriptor, O_CLOEXEC);
    } else if (depth < kDeepest && is_epoll(target.descriptor)) {
      replace_sockets(target.descriptor, null, depth + 1);
    }
  }
}

}  // namespace

void let_go_of_sockets(int epoll) {
  const int null = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  if (null < 0) return;
  replace_sockets(epoll, null, 1);
  ::close(null);
}

}  // namespace qccl::ucx
