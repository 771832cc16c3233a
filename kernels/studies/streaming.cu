// streaming: f = the Laplacian of u on a 3-D grid, with loads and stores that tell the caches what is
//   needed again  Source: AMD lab notes, finite difference method, part 3
// Shapes:  u, f [nz, ny, nx] f32; f is zero before, and its boundary stays so
// Problem: laplacian
// Sizes:   nx 256; ny 256; nz 256
// Sizes:   nx 512; ny 512; nz 512
// Check:   nx 3, 300; ny 3, 18; nz 3, 6
// Claim:   streaming_stores < plain: results are never read, so they should not take the place of u in L2
// Claim:   plain < no_l1: seven threads read each point, and a reader in the same block finds it in L1
// Claim:   streaming_stores < streaming_loads: u is read seven times; it is the wrong array to stream
// Note:    Bytes are counted as if each point of u were read once and each of f written once, so the rate tells how
//          near to ideal traffic a rung comes. AMD's non-temporal builtins are `__ldcs` and `__stcs` here: such lines
//          are the first that L2 gives up; they do not pass it by. Where L2 holds the planes under way, nothing is
//          left to gain.

// A thread computes one point inside. `load` and `store` are its way to read and write.
template <typename Load, typename Store>
__device__ __forceinline__ void laplacian_point(const float* u, float* f, int nx, int ny, float inverse_hx2,
                                                float inverse_hy2, float inverse_hz2, float center_factor, Load load,
                                                Store store) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x, j = 1 + blockIdx.y, k = 1 + blockIdx.z;
    if (i == 0 || i >= nx - 1) return;
    const size_t slice = static_cast<size_t>(nx) * ny, place = slice * k + static_cast<size_t>(nx) * j + i;
    const float* center = u + place;
    store(f + place, center_factor * load(center) + inverse_hx2 * (load(center - 1) + load(center + 1)) +
                         inverse_hy2 * (load(center - nx) + load(center + nx)) +
                         inverse_hz2 * (load(center - slice) + load(center + slice)));
}

struct PlainLoad {
    __device__ float operator()(const float* place) const { return *place; }
};

struct PlainStore {
    __device__ void operator()(float* place, float value) const { *place = value; }
};

struct StreamingStore {
    __device__ void operator()(float* place, float value) const { __stcs(place, value); }
};

// rung plain: plain loads and stores, the article's first kernel.
// launch: plain_access<<<dim3((nx + 255) / 256, ny - 2, nz - 2), 256>>>
__global__ void plain_access(const float* u, float* f, int nx, int ny, float inverse_hx2, float inverse_hy2,
                             float inverse_hz2, float center_factor) {
    laplacian_point(u, f, nx, ny, inverse_hx2, inverse_hy2, inverse_hz2, center_factor, PlainLoad(), PlainStore());
}

// rung streaming_stores: `__stcs` marks results as the first that the caches give up: the article's change of one line.
// launch: stream_results<<<dim3((nx + 255) / 256, ny - 2, nz - 2), 256>>>
__global__ void stream_results(const float* u, float* f, int nx, int ny, float inverse_hx2, float inverse_hy2,
                               float inverse_hz2, float center_factor) {
    laplacian_point(u, f, nx, ny, inverse_hx2, inverse_hy2, inverse_hz2, center_factor, PlainLoad(), StreamingStore());
}

// rung read_only: plain stores, and loads by `__ldg`. A compiler does the same for `const float* __restrict__`.
// launch: load_read_only<<<dim3((nx + 255) / 256, ny - 2, nz - 2), 256>>>
__global__ void load_read_only(const float* u, float* f, int nx, int ny, float inverse_hx2, float inverse_hy2,
                               float inverse_hz2, float center_factor) {
    laplacian_point(
        u, f, nx, ny, inverse_hx2, inverse_hy2, inverse_hz2, center_factor,
        [](const float* place) { return __ldg(place); }, PlainStore());
}

// rung read_only_streaming_stores: both changes: loads by `__ldg`, and streaming stores.
// launch: load_read_only_stream_results<<<dim3((nx + 255) / 256, ny - 2, nz - 2), 256>>>
__global__ void load_read_only_stream_results(const float* u, float* f, int nx, int ny, float inverse_hx2,
                                              float inverse_hy2, float inverse_hz2, float center_factor) {
    laplacian_point(
        u, f, nx, ny, inverse_hx2, inverse_hy2, inverse_hz2, center_factor,
        [](const float* place) { return __ldg(place); }, StreamingStore());
}

// rung streaming_loads: streaming stores, and a mistake: u is marked as the first to go, too, though six more threads
//   want each point.
// launch: stream_all<<<dim3((nx + 255) / 256, ny - 2, nz - 2), 256>>>
__global__ void stream_all(const float* u, float* f, int nx, int ny, float inverse_hx2, float inverse_hy2,
                           float inverse_hz2, float center_factor) {
    laplacian_point(
        u, f, nx, ny, inverse_hx2, inverse_hy2, inverse_hz2, center_factor,
        [](const float* place) { return __ldcs(place); }, StreamingStore());
}

// rung no_l1: `__ldcg` keeps loads in L2 only, which shows what L1 does for the others.
// launch: skip_l1<<<dim3((nx + 255) / 256, ny - 2, nz - 2), 256>>>
__global__ void skip_l1(const float* u, float* f, int nx, int ny, float inverse_hx2, float inverse_hy2,
                        float inverse_hz2, float center_factor) {
    laplacian_point(
        u, f, nx, ny, inverse_hx2, inverse_hy2, inverse_hz2, center_factor,
        [](const float* place) { return __ldcg(place); }, PlainStore());
}
