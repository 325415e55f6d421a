// Runs calls of launchers, each in a process forked for it, so that a faulty kernel or a sanitizer ends only this call.
// Every buffer is copied into its own allocation, which ends at the buffer's last byte.
//
//   replay            prints the launchers' signatures
//   replay SECONDS    reads names of files from stdin, one a line. For each it runs the call in the file for at most
//                     SECONDS, writes the buffers back into it and messages into FILE.err, and prints the exit status
//                     of the call's process, or minus the signal that ended it.
//
// A call takes 3 ms of processor time in a fork, and 17 ms in a new process, where the sanitizers set up their memory.
//
// FILE begins with three 64-bit words: the length of the launcher's name, the number of arguments and the number of
// buffers. Then come the name, for each argument a word with its bits, and for each buffer its address in the calling
// process, its size and its bytes. Pointers into a buffer are changed into pointers into its copy. Exit status 1: the
// launcher did not return 0; 2: this program failed, for example since FILE or a pointer in it is wrong; others come
// from a sanitizer.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "call.h"

namespace {

constexpr size_t kAlignment = 64;  // PyTorch aligns a CPU tensor's memory to this

struct Buffer {
  uint64_t address, size;
  long offset;  // of its bytes in the file
  std::unique_ptr<char, void (*)(void*)> memory{nullptr, std::free};
  char* data;
};

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "replay: %s\n", what);
  std::exit(2);
}

void read(std::FILE* file, void* to, size_t bytes) {
  require(std::fread(to, 1, bytes, file) == bytes, "the file of the call ends too early");
}

uint64_t read_word(std::FILE* file) {
  uint64_t word;
  read(file, &word, sizeof word);
  return word;
}

std::string types_of(const std::string& name) {
  const std::string lines = std::string("\n") + moe_signatures();
  const size_t at = lines.find("\n" + name + " ");
  require(at != std::string::npos, "no such launcher");
  const size_t start = at + name.size() + 2;
  return lines.substr(start, lines.find('\n', start) - start);
}

uint64_t to_copy(uint64_t pointer, const std::vector<Buffer>& buffers) {
  if (pointer == 0) return 0;
  for (const Buffer& each : buffers) {
    if (pointer >= each.address && pointer - each.address < (each.size ? each.size : 1)) {
      return reinterpret_cast<uint64_t>(each.data + (pointer - each.address));
    }
  }
  require(false, "a pointer into none of the announced buffers");
  return 0;
}

int run(const std::string& path) {
  std::FILE* file = std::fopen(path.c_str(), "r+b");
  require(file != nullptr, "cannot open the file of the call");
  std::string name(read_word(file), ' ');
  std::vector<uint64_t> words(read_word(file));
  std::vector<Buffer> buffers(read_word(file));
  read(file, name.data(), name.size());
  read(file, words.data(), words.size() * sizeof(uint64_t));
  for (Buffer& each : buffers) {
    each.address = read_word(file);
    each.size = read_word(file);
    each.offset = std::ftell(file);
    // The copy has the same offset from a multiple of kAlignment as the buffer.
    const size_t lead = each.address % kAlignment;
    void* memory = nullptr;
    require(posix_memalign(&memory, kAlignment, lead + each.size) == 0, "out of memory");
    each.memory.reset(static_cast<char*>(memory));
    each.data = each.memory.get() + lead;
    read(file, each.data, each.size);
  }
  const std::string types = types_of(name);
  for (size_t i = 0; i < words.size() && i < types.size(); i++) {
    if (types[i] == 'p') words[i] = to_copy(words[i], buffers);
  }
  if (const int status = moe_call(name.c_str(), words.data())) {
    std::fprintf(stderr, "the launcher returned %d\n", status);
    return 1;
  }
  for (const Buffer& each : buffers) {
    std::fseek(file, each.offset, SEEK_SET);
    require(std::fwrite(each.data, 1, each.size, file) == each.size, "cannot write the buffers back");
  }
  std::fclose(file);
  return 0;
}

// Runs the call in another process and returns how that process ended.
int outcome(const std::string& path, unsigned seconds) {
  const pid_t child = fork();
  require(child >= 0, "cannot fork");
  if (child == 0) {
    const int messages = open((path + ".err").c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    require(messages >= 0 && dup2(messages, STDERR_FILENO) >= 0, "cannot write the messages of the call");
    alarm(seconds);  // SIGALRM ends the process
    _exit(run(path));  // without the cleanup of exit, a sixth of the child's time
  }
  int status = 0;
  require(waitpid(child, &status, 0) == child, "cannot wait for the call");
  return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

}  // namespace

int main(int count, char** arguments) {
  if (count == 1) {
    std::fputs(moe_signatures(), stdout);
    return 0;
  }
  const unsigned seconds = std::strtoul(arguments[1], nullptr, 10);
  for (std::string path; std::getline(std::cin, path);) std::cout << outcome(path, seconds) << std::endl;
  return 0;
}
