// Compaction by hand, what policies take and have done, scores, and what sequences have learnt of
// their queries.
using System;
using Kvrt.Native;

namespace Kvrt
{
    public sealed unsafe partial class Pool
    {
        /// <summary>Runs one round now: score, select, move survivors, return the emptied blocks.
        /// Inside an open step it runs at its end.</summary>
        /// <param name="sequence">The sequence.</param>
        /// <param name="policy">For this round only; null: the sequence's own.</param>
        public CompressReport Compress(Sequence sequence, Policy policy = null)
        {
            kv_policy native = policy == null ? default : NativePolicy.Describe(policy);
            kv_compress_options options = default;
            options.struct_size = (uint)sizeof(kv_compress_options);
            options.policy = policy == null ? null : &native;
            kv_compress_report report = default;
            report.struct_size = (uint)sizeof(kv_compress_report);
            int status;
            PoolLease lease = Enter();
            try
            {
                status = NativeMethods.kv_compress(lease.Pool, sequence.Handle, &options, &report);
            }
            finally
            {
                lease.Release();
            }
            Finish(status);
            return new CompressReport(report);
        }

        /// <summary>What a sequence takes under a policy, so that a scheduler can admit by it.
        /// Pinned ranges come on top. <see cref="Status.Invalid"/>: a policy with neither
        /// <see cref="Policy.Every"/> nor <see cref="Policy.Slack"/> has no steady state.
        /// <see cref="Status.TooLarge"/>: more than MaxTokensPerSequence.</summary>
        /// <param name="policy">The policy.</param>
        /// <param name="stepTokens">Most tokens of the sequence in a step: a prefill chunk, or a
        /// token with its drafts; 0: 1.</param>
        /// <param name="tokens">Length of the sequence, for windows and layers that the policy
        /// leaves whole; 0: <see cref="PolicyFootprint.TokensSteady"/>, and full windows.</param>
        public PolicyFootprint GetPolicyFootprint(
            Policy policy, ulong stepTokens = 0, ulong tokens = 0)
        {
            if (policy == null)
            {
                throw new ArgumentNullException(nameof(policy));
            }
            kv_policy native = NativePolicy.Describe(policy);
            kv_policy_footprint footprint = default;
            footprint.struct_size = (uint)sizeof(kv_policy_footprint);
            footprint.step_tokens = stepTokens;
            footprint.tokens = tokens;
            int status;
            PoolLease lease = Enter();
            try
            {
                status = NativeMethods.kv_pool_policy_footprint(lease.Pool, &native, &footprint);
            }
            finally
            {
                lease.Release();
            }
            Finish(status);
            return new PolicyFootprint(footprint);
        }

        /// <summary>What rounds have done to one layer and KV head of a sequence.</summary>
        public RetentionInfo GetRetention(Sequence sequence, uint layer, uint kvHead)
        {
            kv_retention_info info = default;
            info.struct_size = (uint)sizeof(kv_retention_info);
            info.layer = layer;
            info.kv_head = kvHead;
            int status;
            PoolLease lease = Enter();
            try
            {
                status = NativeMethods.kv_seq_get_retention(lease.Pool, sequence.Handle, &info);
            }
            finally
            {
                lease.Release();
            }
            Finish(status);
            return new RetentionInfo(info);
        }

        /// <summary>Gives the scores of a layer for positions [first, first + tokens) to
        /// <see cref="Scorer.Host"/>: [kv_heads, tokens], higher stays, NaN goes first. Positions
        /// that a head no longer retains are passed over; a token that was given no score ranks
        /// above all that have one.</summary>
        public void SetScores(
            Sequence sequence, uint layer, ulong first, ulong tokens, ReadOnlySpan<float> scores)
        {
            kv_layer_stats stats = default;
            stats.struct_size = (uint)sizeof(kv_layer_stats);
            stats.layer = layer;
            ReadLayerStats(&stats); // without arrays: kv_heads
            ulong length = (ulong)scores.Length;
            if (tokens > length || stats.kv_heads * tokens != length)
            {
                throw new KvrtArgumentException(Status.Invalid,
                    $"scores holds {length} elements, [{stats.kv_heads}, {tokens}] are needed");
            }
            int status;
            PoolLease lease = Enter();
            try
            {
                fixed (float* given = scores)
                {
                    status = NativeMethods.kv_seq_set_scores(
                        lease.Pool, sequence.Handle, layer, first, tokens, given);
                }
            }
            finally
            {
                lease.Release();
            }
            Finish(status);
        }

        /// <summary>Writes what a sequence's scorer has observed of one layer and KV head, or was
        /// given, as far as there is room, and returns how many there are: a number per retained
        /// token, in the order of <see cref="GetPositions"/>; 0 where nothing was observed.
        /// </summary>
        public ulong GetScores(Sequence sequence, uint layer, uint kvHead, Span<float> scores)
        {
            ulong count = 0;
            int status;
            PoolLease lease = Enter();
            try
            {
                fixed (float* room = scores)
                {
                    status = NativeMethods.kv_seq_get_scores(
                        lease.Pool, sequence.Handle, layer, kvHead, (ulong)scores.Length, room,
                        &count);
                }
            }
            finally
            {
                lease.Release();
            }
            Finish(status);
            return count;
        }

        /// <summary>Reads what a sequence has gathered so far of the layer that the statistics
        /// name. </summary>
        public void GetStatistics(Sequence sequence, QueryStatistics statistics)
        {
            if (statistics == null)
            {
                throw new ArgumentNullException(nameof(statistics));
            }
            int status;
            PoolLease lease = Enter();
            try
            {
                fixed (float* real = statistics.MeanReal)
                fixed (float* imaginary = statistics.MeanImaginary)
                fixed (float* magnitude = statistics.MeanMagnitude)
                fixed (float* varianceReal = statistics.VarianceReal)
                fixed (float* varianceImaginary = statistics.VarianceImaginary)
                fixed (float* covariance = statistics.Covariance)
                {
                    kv_query_statistics native = statistics.Describe(
                        real, imaginary, magnitude, varianceReal, varianceImaginary, covariance);
                    status = NativeMethods.kv_seq_get_statistics(
                        lease.Pool, sequence.Handle, &native);
                    if (status >= 0)
                    {
                        statistics.Tokens = native.tokens;
                    }
                }
            }
            finally
            {
                lease.Release();
            }
            Finish(status);
        }

        /// <summary>Writes what a sequence has gathered of every layer to a file.</summary>
        public void SaveStatistics(Sequence sequence, string path)
        {
            int status;
            byte[] terminated = Terminated(path);
            PoolLease lease = Enter();
            try
            {
                fixed (byte* bytes = terminated)
                {
                    status = NativeMethods.kv_seq_save_statistics(
                        lease.Pool, sequence.Handle, bytes);
                }
            }
            finally
            {
                lease.Release();
            }
            Finish(status);
        }
    }

    /// <summary>What TriAttention knows of a layer's queries before rotation: per query head and
    /// band, the mean of the complex q and the mean of its magnitude. Expected Attention works with
    /// the mean and, where they are known, with the variances of a band's two dimensions and their
    /// covariance. Arrays are [query_heads, bands]. </summary>
    public sealed unsafe class QueryStatistics
    {
        /// <summary>Statistics of zero queries.</summary>
        /// <param name="layer">Which layer.</param>
        /// <param name="queryHeads">The layer's query heads.</param>
        /// <param name="bands">rotated dimensions / 2 + dimensions that are not rotated.</param>
        /// <param name="covariances">With variances and covariances.</param>
        public QueryStatistics(
            uint layer, uint queryHeads, uint bands, bool covariances = false)
        {
            ulong length = (ulong)queryHeads * bands;
            if (length == 0 || length > int.MaxValue / sizeof(float))
            {
                throw new KvrtArgumentException(
                    Status.Invalid, $"statistics of {queryHeads} heads and {bands} bands");
            }
            Layer = layer;
            QueryHeads = queryHeads;
            Bands = bands;
            MeanReal = new float[length];
            MeanImaginary = new float[length];
            MeanMagnitude = new float[length];
            if (covariances)
            {
                VarianceReal = new float[length];
                VarianceImaginary = new float[length];
                Covariance = new float[length];
            }
        }

        /// <summary>Which layer.</summary>
        public uint Layer { get; }

        /// <summary>The layer's query heads.</summary>
        public uint QueryHeads { get; }

        /// <summary>Bands of a head.</summary>
        public uint Bands { get; }

        /// <summary>How many queries were averaged.</summary>
        public ulong Tokens { get; set; }

        /// <summary>Real parts of the means.</summary>
        public float[] MeanReal { get; }

        /// <summary>Imaginary parts of the means.</summary>
        public float[] MeanImaginary { get; }

        /// <summary>Means of the magnitudes.</summary>
        public float[] MeanMagnitude { get; }

        /// <summary>Variances of the bands' first dimensions, or null.</summary>
        public float[] VarianceReal { get; }

        /// <summary>Variances of the bands' second dimensions, or null.</summary>
        public float[] VarianceImaginary { get; }

        /// <summary>Covariances of the two, or null.</summary>
        public float[] Covariance { get; }

        internal kv_query_statistics Describe(
            float* real, float* imaginary, float* magnitude, float* varianceReal,
            float* varianceImaginary, float* covariance)
        {
            kv_query_statistics native = default;
            native.struct_size = (uint)sizeof(kv_query_statistics);
            native.layer = Layer;
            native.query_heads = QueryHeads;
            native.bands = Bands;
            native.tokens = Tokens;
            native.mean_real = real;
            native.mean_imaginary = imaginary;
            native.mean_magnitude = magnitude;
            native.variance_real = varianceReal;
            native.variance_imaginary = varianceImaginary;
            native.covariance = covariance;
            return native;
        }
    }
}
