// rotary_two_parts: each half of a head turned by its own position: ChatGLM's pairs  Source: fastllm, RotatePosition2D
// Shapes:  data [num_tokens, stride] f32, in place: query heads, key heads, values; positions [2, num_tokens] i32, one
//          row a part; cosines, sines [4096, head_dim / 4] f32; cos_sin [4096, head_dim / 4] float2
// Problem: rotary_two_parts
// Sizes:   num_tokens 1, 2048; num_attention_heads 32; num_key_value_heads 8; head_dim 128
// Check:   num_tokens 1, 7; num_attention_heads 6; num_key_value_heads 2; head_dim 16, 80
// Check:   num_tokens 3; num_attention_heads 4; num_key_value_heads 4; head_dim 128
// Claim:   head_a_block < thread_a_pair at num_tokens 2048: half as many blocks, each of two warps
// Claim:   packed < head_a_block at num_tokens 2048: four pairs a thread, and a quarter of all loads and stores
// Note:    The first part of a head knows where a token stands in its block, the second which block it is. A head of
//          128 has parts of 64, and pairs 32 numbers apart.

// rung thread_a_pair: the article's kernel: a thread a pair, a block a part of a head: 32 threads for a head of 128.
// launch: thread_a_pair<<<num_tokens * 2 * (num_attention_heads + num_key_value_heads), head_dim / 4>>>
__global__ void thread_a_pair(float* data, const int* positions, const float* cosines, const float* sines,
                              int num_tokens, int num_attention_heads, int num_key_value_heads, int head_dim,
                              int stride) {
    const int num_heads = num_attention_heads + num_key_value_heads, j = threadIdx.x;
    const int token = blockIdx.x / num_heads / 2, part = blockIdx.x / num_heads % 2, head = blockIdx.x % num_heads;
    const int place = positions[part * num_tokens + token] * (head_dim / 4) + j;
    const float cosine = cosines[place], sine = sines[place];
    float* x = data + size_t(token) * stride + head * head_dim + part * (head_dim / 2) + j;
    const float low = x[0], high = x[head_dim / 4];
    x[0] = low * cosine - high * sine;
    x[head_dim / 4] = low * sine + high * cosine;
}

// rung head_a_block: both parts of a head in one block.
// launch: head_a_block<<<num_tokens * (num_attention_heads + num_key_value_heads), head_dim / 2>>>
__global__ void head_a_block(float* data, const int* positions, const float* cosines, const float* sines,
                             int num_tokens, int num_attention_heads, int num_key_value_heads, int head_dim,
                             int stride) {
    const int num_heads = num_attention_heads + num_key_value_heads;
    const int token = blockIdx.x / num_heads, head = blockIdx.x % num_heads;
    const int part = threadIdx.x / (head_dim / 4), j = threadIdx.x % (head_dim / 4);
    const int place = positions[part * num_tokens + token] * (head_dim / 4) + j;
    const float cosine = cosines[place], sine = sines[place];
    float* x = data + size_t(token) * stride + head * head_dim + part * (head_dim / 2) + j;
    const float low = x[0], high = x[head_dim / 4];
    x[0] = low * cosine - high * sine;
    x[head_dim / 4] = low * sine + high * cosine;
}

// rung packed: four pairs a thread in loads of 16 bytes, from one table that has cosine and sine side by side.
// launch: packed<<<dim3(num_tokens, ((num_attention_heads + num_key_value_heads) * head_dim / 8 + 127) / 128), 128>>>
__global__ void packed(float* data, const int* positions, const float* cos_sin, int num_tokens, int num_attention_heads,
                       int num_key_value_heads, int head_dim, int stride) {
    const int packs = head_dim / 16;  // of a quarter of a head, which is a multiple of 16 bytes
    const int index = blockIdx.y * blockDim.x + threadIdx.x;
    const int head = index / packs / 2, part = index / packs % 2, j = 4 * (index % packs);
    if (head >= num_attention_heads + num_key_value_heads) return;
    float* x = data + size_t(blockIdx.x) * stride + head * head_dim + part * (head_dim / 2) + j;
    const float* angles = cos_sin + size_t(positions[part * num_tokens + blockIdx.x]) * (head_dim / 2) + 2 * j;
    const float4 low = *reinterpret_cast<const float4*>(x), high = *reinterpret_cast<const float4*>(x + head_dim / 4);
    const float4 a = *reinterpret_cast<const float4*>(angles), b = *reinterpret_cast<const float4*>(angles + 4);
    *reinterpret_cast<float4*>(x) = make_float4(low.x * a.x - high.x * a.y, low.y * a.z - high.y * a.w,
                                                low.z * b.x - high.z * b.y, low.w * b.z - high.w * b.w);
    *reinterpret_cast<float4*>(x + head_dim / 4) = make_float4(low.x * a.y + high.x * a.x, low.y * a.w + high.y * a.z,
                                                               low.z * b.y + high.z * b.x, low.w * b.w + high.w * b.z);
}
