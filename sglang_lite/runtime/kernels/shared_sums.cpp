// Exchanges between processes of one machine, through memory that all of them have.
//
// Memory: a Line for each rank, then [2, ranks, slot] bytes. Exchange e uses the half e % 2: whoever has seen all ranks in
// exchange e + 1 may write e + 2, as its readers had read e before they began e + 1.

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstring>
#include <ctime>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr int kSpins = 2000;      // looks before a rank sleeps
constexpr long kBlock = 1024;     // numbers that are summed at once
constexpr long kNap = 100000000;  // nanoseconds of a sleep, after which the time is looked at

struct alignas(64) Line {
    std::atomic<uint32_t> epoch;     // exchanges that the rank has begun, modulo 2^32
    std::atomic<uint32_t> sleeping;  // ranks that wait for the next one
};
static_assert(sizeof(Line) == 64);

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

long call_futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* time) {
    return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, time, nullptr, 0);
}

double now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

// Waits until a rank has begun an exchange. Returns false if it hasn't after `seconds`.
bool wait_for(Line& line, uint32_t epoch, double seconds) {
    const auto come = [&] { return static_cast<int32_t>(line.epoch.load() - epoch) >= 0; };
    for (int i = 0; i < kSpins; i++) {
        if (come()) return true;
        pause();
    }
    const double end = now() + seconds;
    const timespec nap{0, kNap};
    line.sleeping.fetch_add(1);
    bool there;
    while (!(there = come()) && now() < end) call_futex(&line.epoch, FUTEX_WAIT, epoch - 1, &nap);
    line.sleeping.fetch_sub(1);
    return there;
}

float as_float(float x) { return x; }
float as_float(uint16_t bits) {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float x;
    std::memcpy(&x, &wide, sizeof x);
    return x;
}

void round_to(float x, float& out) { out = x; }
void round_to(float x, uint16_t& out) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const bool nan = (bits & 0x7fffffff) > 0x7f800000;
    out = nan ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Sums what the ranks have sent, in the order of the ranks: all get the same bits.
template <typename T>
void sum(const char* half, long slot, int ranks, long count, T* out) {
    float total[kBlock];
    for (long at = 0; at < count; at += kBlock) {
        const long size = count - at < kBlock ? count - at : kBlock;
        for (int rank = 0; rank < ranks; rank++) {
            const T* x = reinterpret_cast<const T*>(half + rank * slot) + at;
            if (rank == 0)
                for (long i = 0; i < size; i++) total[i] = as_float(x[i]);
            else
                for (long i = 0; i < size; i++) total[i] += as_float(x[i]);
        }
        for (long i = 0; i < size; i++) round_to(total[i], out[at + i]);
    }
}

}  // namespace

extern "C" {

// Sends `bytes` of x to all ranks, and waits for theirs. Returns -1, or the rank that has not come in time.
int exchange(char* memory, int ranks, long slot, int rank, uint32_t epoch, const char* x, long bytes, double seconds) {
    Line* lines = reinterpret_cast<Line*>(memory);
    char* half = memory + ranks * sizeof(Line) + (epoch & 1) * ranks * slot;
    std::memcpy(half + rank * slot, x, bytes);
    lines[rank].epoch.store(epoch);
    if (lines[rank].sleeping.load()) call_futex(&lines[rank].epoch, FUTEX_WAKE, INT_MAX, nullptr);
    for (int other = 0; other < ranks; other++)
        if (other != rank && !wait_for(lines[other], epoch, seconds)) return other;
    return -1;
}

// Writes the sum of what the ranks have sent in an exchange.
void sum_float32(const char* memory, int ranks, long slot, uint32_t epoch, long count, float* out) {
    sum(memory + ranks * sizeof(Line) + (epoch & 1) * ranks * slot, slot, ranks, count, out);
}

void sum_bfloat16(const char* memory, int ranks, long slot, uint32_t epoch, long count, uint16_t* out) {
    sum(memory + ranks * sizeof(Line) + (epoch & 1) * ranks * slot, slot, ranks, count, out);
}
}
