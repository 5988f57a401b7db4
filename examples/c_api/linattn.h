/* linattn for C and whatever calls C: linear attention in float, on matrices of the caller's, without a copy.
 *
 *   linattn_attention* attn = NULL;
 *   linattn_options options = {"elu_plus_one", "additive", 64, 64, 8, 1.0};
 *   if (linattn_attention_create(&options, &attn) != LINATTN_OK) puts(linattn_last_error());
 *
 *   linattn_state* state = NULL;
 *   linattn_state_create(attn, &state);
 *   linattn_forward_causal(state, q, k, v, NULL, out);                       the prompt
 *   linattn_step(state, q_t, k_t, v_t, NULL, NULL, out_t);                   token by token; allocates nothing
 *   linattn_state_destroy(state);
 *   linattn_attention_destroy(attn);
 *
 * Letters: N tokens, D head_dim, M value_dim, H heads. A matrix has one token a row, and its heads side by side.
 *
 * Errors: calls return LINATTN_OK or say in linattn_last_error() what is wrong, and have then written nothing. No C++
 * exception leaves the library. NULL for a handle, or for what must not be NULL, is an error, too; destroying NULL is
 * none. Outputs must not overlap inputs.
 *
 * Threads: an attention never changes and serves any number of threads. A state belongs to one sequence, and to one
 * call at a time.
 */
#ifndef LINATTN_H
#define LINATTN_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32) && defined(LINATTN_C_BUILD)
#define LINATTN_C_API __declspec(dllexport)
#elif defined(_WIN32)
#define LINATTN_C_API __declspec(dllimport)
#else
#define LINATTN_C_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum linattn_status {
  LINATTN_OK = 0,
  LINATTN_INVALID_ARGUMENT = 1,
  LINATTN_OUT_OF_MEMORY = 2,
  LINATTN_INTERNAL_ERROR = 3
} linattn_status;

typedef struct linattn_attention linattn_attention; /* what is fixed when a model is made */
typedef struct linattn_state linattn_state;         /* what one sequence has seen, and the scratch of its calls */

/* Fields that are 0 or NULL mean what stands in brackets. */
typedef struct linattn_options {
  const char* feature_map; /* "elu_plus_one" [it], "relu" or "identity", which is not normalised */
  const char* rule;        /* "additive" [it], with every map; "gated", "delta", "gated_delta", with "identity" */
  int64_t head_dim;        /* D */
  int64_t value_dim;       /* M [head_dim] */
  int64_t heads;           /* H [1] */
  double query_scale;      /* multiplies q [1] */
} linattn_options;

/* Rows of contiguous floats, row_stride floats apart; a row_stride of 0 shows an input's one row in every row. */
typedef struct linattn_input {
  const float* data;
  int64_t rows, cols, row_stride;
} linattn_input;

typedef struct linattn_output {
  float* data;
  int64_t rows, cols, row_stride;
} linattn_output;

/* What the gated and delta rules take beside q, k and v, and where its gradients go, (N, H) each: log_decay of "gated"
 * and "gated_delta", beta of "delta" and "gated_delta". Of what a rule does not take, data must be NULL. */
typedef struct linattn_gates {
  linattn_input log_decay, beta;
} linattn_gates;

typedef struct linattn_gate_gradients {
  linattn_output log_decay, beta; /* all 0: not computed */
} linattn_gate_gradients;

/* "0.1.0" */
LINATTN_C_API const char* linattn_version(void);

/* The sentence of this thread's last call that failed, "" before the first; it stays until the next that fails. */
LINATTN_C_API const char* linattn_last_error(void);

LINATTN_C_API linattn_status linattn_attention_create(const linattn_options* options, linattn_attention** attention);
/* States that it made live on. */
LINATTN_C_API void linattn_attention_destroy(linattn_attention* attention);

/* out (N, H M) from q (N, H D), k (Nk, H D), v (Nk, H M): every query sees every key. Rule "additive" only. Allocates
 * scratch whose size does not depend on N. */
LINATTN_C_API linattn_status linattn_forward(const linattn_attention* attention, linattn_input q, linattn_input k,
                                             linattn_input v, linattn_output out);

/* Gradients of linattn_forward_causal from a fresh state: dq, dk, dv of the shapes of q, k, v from dout (N, H M), and
 * those of the gates where gate_gradients is not NULL. Allocates as linattn_forward does. */
LINATTN_C_API linattn_status linattn_vjp_causal(const linattn_attention* attention, linattn_input q, linattn_input k,
                                                linattn_input v, const linattn_gates* gates, linattn_input dout,
                                                linattn_output dq, linattn_output dk, linattn_output dv,
                                                const linattn_gate_gradients* gate_gradients);

LINATTN_C_API linattn_status linattn_state_create(const linattn_attention* attention, linattn_state** state);
LINATTN_C_API linattn_status linattn_state_copy(const linattn_state* state, linattn_state** copy);
LINATTN_C_API linattn_status linattn_state_reset(linattn_state* state);
LINATTN_C_API void linattn_state_destroy(linattn_state* state);

/* Tokens seen; -1 of NULL. */
LINATTN_C_API int64_t linattn_state_tokens(const linattn_state* state);

/* Bytes of a saved state; the same for all states of an attention. 0 of NULL. */
LINATTN_C_API size_t linattn_state_saved_bytes(const linattn_state* state);
/* A record that any machine's build of linattn loads into a state of an attention of the same sizes, map and rule; a
 * record that is cut off, damaged or another's is refused, and the state is as it was. */
LINATTN_C_API linattn_status linattn_state_save(const linattn_state* state, void* to, size_t bytes);
LINATTN_C_API linattn_status linattn_state_load(linattn_state* state, const void* from, size_t bytes);

/* out (N, H M) from q, k (N, H D), v (N, H M): row i sees what the state has seen and rows 0 ... i. The state has then
 * seen all of them. gates may be NULL where the rule takes none. Allocates nothing. */
LINATTN_C_API linattn_status linattn_forward_causal(linattn_state* state, linattn_input q, linattn_input k,
                                                    linattn_input v, const linattn_gates* gates, linattn_output out);

/* One token: q, k (H D), v, out (H M), log_decay, beta (H), NULL where the rule does not take them. */
LINATTN_C_API linattn_status linattn_step(linattn_state* state, const float* q, const float* k, const float* v,
                                          const float* log_decay, const float* beta, float* out);

#ifdef __cplusplus
}
#endif

#endif
