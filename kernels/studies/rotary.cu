// rotary: (x[j], x[j+h]) turned by an angle, h = head_dim / 2: LLaMA's pairs  Source: fastllm, LlamaRotatePosition2D
// Shapes:  data [num_tokens, stride] f32, in place: query heads, key heads, values; positions [num_tokens] i32;
//          cosines, sines [4096, head_dim / 2] f32; cos_sin [4096, head_dim / 2] float2; frequencies [head_dim / 2] f32
// Problem: rotary_half
// Sizes:   num_tokens 1, 2048; num_attention_heads 32; num_key_value_heads 8; head_dim 128
// Check:   num_tokens 1, 7; num_attention_heads 6; num_key_value_heads 2; head_dim 16, 80
// Check:   num_tokens 3; num_attention_heads 4; num_key_value_heads 4; head_dim 128
// Claim:   thread_a_pair < computed at num_tokens 2048: two loads of a table take less than a sine and a cosine
// Claim:   token_a_block < computed at num_tokens 2048: the sine and cosine of a token serve all its heads
// Claim:   computed < token_a_block at num_tokens 1: one block is one multiprocessor, however little it computes
// Claim:   packed < thread_a_pair at num_tokens 2048: four pairs a thread, and a quarter of all loads and stores
// Note:    Every number is read and written once. A table costs a load where computing costs dozens of instructions.
//          __sincosf is quick, but loses the digits of large angles, so no rung has it.

// rung computed: a thread a pair, a block a head of a token; each thread computes the sine and cosine of its angle.
// launch: computed<<<num_tokens * (num_attention_heads + num_key_value_heads), head_dim / 2>>>
__global__ void computed(float* data, const int* positions, const float* frequencies, int num_attention_heads,
                         int num_key_value_heads, int head_dim, int stride) {
    const int num_heads = num_attention_heads + num_key_value_heads, j = threadIdx.x;
    const int token = blockIdx.x / num_heads, head = blockIdx.x % num_heads;
    float* x = data + size_t(token) * stride + head * head_dim + j;
    float sine, cosine;
    sincosf(static_cast<float>(positions[token]) * frequencies[j], &sine, &cosine);
    const float low = x[0], high = x[head_dim / 2];
    x[0] = low * cosine - high * sine;
    x[head_dim / 2] = low * sine + high * cosine;
}

// rung token_a_block: a block has a whole token, and a thread one pair of every head: one sine and cosine for them all.
// launch: token_a_block<<<num_tokens, head_dim / 2>>>
__global__ void token_a_block(float* data, const int* positions, const float* frequencies, int num_attention_heads,
                              int num_key_value_heads, int head_dim, int stride) {
    const int num_heads = num_attention_heads + num_key_value_heads, j = threadIdx.x;
    float* x = data + size_t(blockIdx.x) * stride + j;
    float sine, cosine;
    sincosf(static_cast<float>(positions[blockIdx.x]) * frequencies[j], &sine, &cosine);
    for (int head = 0; head < num_heads; ++head, x += head_dim) {
        const float low = x[0], high = x[head_dim / 2];
        x[0] = low * cosine - high * sine;
        x[head_dim / 2] = low * sine + high * cosine;
    }
}

// rung thread_a_pair: the article's kernel: a thread a pair, a block a head of a token, angles from two tables. (Its
//   positions are floats, these are whole numbers.)
// launch: thread_a_pair<<<num_tokens * (num_attention_heads + num_key_value_heads), head_dim / 2>>>
__global__ void thread_a_pair(float* data, const int* positions, const float* cosines, const float* sines,
                              int num_attention_heads, int num_key_value_heads, int head_dim, int stride) {
    const int num_heads = num_attention_heads + num_key_value_heads, j = threadIdx.x;
    const int token = blockIdx.x / num_heads, head = blockIdx.x % num_heads;
    const int place = positions[token] * (head_dim / 2) + j;
    const float cosine = cosines[place], sine = sines[place];
    float* x = data + size_t(token) * stride + head * head_dim + j;
    const float low = x[0], high = x[head_dim / 2];
    x[0] = low * cosine - high * sine;
    x[head_dim / 2] = low * sine + high * cosine;
}

// rung packed: four pairs a thread in loads of 16 bytes, from one table that has cosine and sine side by side.
// launch: packed<<<dim3(num_tokens, ((num_attention_heads + num_key_value_heads) * head_dim / 8 + 127) / 128), 128>>>
__global__ void packed(float* data, const int* positions, const float* cos_sin, int num_attention_heads,
                       int num_key_value_heads, int head_dim, int stride) {
    const int packs = head_dim / 8;  // of half a head, which is a multiple of 16 bytes
    const int index = blockIdx.y * blockDim.x + threadIdx.x, head = index / packs, j = 4 * (index % packs);
    if (head >= num_attention_heads + num_key_value_heads) return;
    float* x = data + size_t(blockIdx.x) * stride + head * head_dim + j;
    const float* angles = cos_sin + size_t(positions[blockIdx.x]) * head_dim + 2 * j;
    const float4 low = *reinterpret_cast<const float4*>(x), high = *reinterpret_cast<const float4*>(x + head_dim / 2);
    const float4 a = *reinterpret_cast<const float4*>(angles), b = *reinterpret_cast<const float4*>(angles + 4);
    *reinterpret_cast<float4*>(x) = make_float4(low.x * a.x - high.x * a.y, low.y * a.z - high.y * a.w,
                                                low.z * b.x - high.z * b.y, low.w * b.z - high.w * b.w);
    *reinterpret_cast<float4*>(x + head_dim / 2) = make_float4(low.x * a.y + high.x * a.x, low.y * a.w + high.y * a.z,
                                                               low.z * b.y + high.z * b.x, low.w * b.w + high.w * b.z);
}
