// A Mac's kernel lets nobody set an option of a socket whose peer has reset it. To be preloaded.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

static int was_reset(int fd) {
  struct tcp_info about;
  struct sockaddr_in own;
  socklen_t size = sizeof(about), of_own = sizeof(own);
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &about, &size) != 0 || about.tcpi_state != TCP_CLOSE) {
    return 0;
  }
  return getsockname(fd, (struct sockaddr*)&own, &of_own) == 0 && own.sin_port != 0; // a new one has no port yet
}

int setsockopt(int fd, int level, int name, const void* value, socklen_t length) {
  int (*real)(int, int, int, const void*, socklen_t) = dlsym(RTLD_NEXT, "setsockopt");
  if (was_reset(fd)) {
    errno = EINVAL;
    return -1;
  }
  return real(fd, level, name, value, length);
}
