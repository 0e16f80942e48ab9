// What calls on sequences and steps tell: views of the structs that the library filled.
using Kvrt.Native;

namespace Kvrt
{
    /// <summary>The lengths, in tokens seen, and the blocks of a sequence.</summary>
    public readonly struct SequenceInfo
    {
        private readonly kv_seq_info report;

        internal SequenceInfo(kv_seq_info report)
        {
            this.report = report;
        }

        /// <summary>Positions for which slots are reserved.</summary>
        public ulong Capacity => report.capacity;

        /// <summary>Positions that the open step has been asked to write, or accepted.</summary>
        public ulong Written => report.written;

        /// <summary>The next position after the last step end.</summary>
        public ulong Accepted => report.accepted;

        /// <summary>Visible to prefix match.</summary>
        public ulong Published => report.published;

        /// <summary>In this sequence's tables, shared ones included.</summary>
        public ulong Blocks => report.blocks;

        /// <summary>Of those blocks.</summary>
        public ulong Bytes => report.bytes;

        /// <summary>As given at creation.</summary>
        public ulong UserData => report.user_data;

        /// <summary>Whether an open step holds it.</summary>
        public bool InStep => report.in_step != 0;

        /// <summary>Rounds that have removed something.</summary>
        public uint Compactions => report.compactions;

        /// <summary>Rounds of its policy that were due and removed nothing.</summary>
        public ulong RoundsSkipped => report.rounds_skipped;

        /// <summary>Of its last round; null: there was none.</summary>
        public CompressOutcome? LastOutcome =>
            report.last_outcome == 0 ? (CompressOutcome?)null
                                     : (CompressOutcome)report.last_outcome;

        /// <summary>Of its last round: <see cref="Status.Again"/> when blocks were
        /// missing.</summary>
        public Status LastFailure => (Status)report.last_failure;
    }

    /// <summary>What one layer holds of a sequence.</summary>
    public readonly struct SequenceLayerInfo
    {
        private readonly kv_seq_layer_info report;

        internal SequenceLayerInfo(kv_seq_layer_info report)
        {
            this.report = report;
        }

        /// <summary>Tokens stored now, accepted ones.</summary>
        public ulong Retained => report.retained;

        /// <summary>In this layer's table; 0 for a layer that shares another's cache.</summary>
        public ulong Blocks => report.blocks;

        /// <summary>Of those, read by others too.</summary>
        public ulong SharedBlocks => report.shared_blocks;
    }

    /// <summary>Where appended tokens stand.</summary>
    public readonly struct AppendInfo
    {
        private readonly kv_append_info report;

        internal AppendInfo(kv_append_info report)
        {
            this.report = report;
        }

        /// <summary>For the library to fill in place.</summary>
        internal static unsafe AppendInfo Empty => new AppendInfo(
            new kv_append_info { struct_size = (uint)sizeof(kv_append_info) });

        /// <summary>Of the appended tokens.</summary>
        public ulong FirstPosition => report.first_position;

        /// <summary>The sequence's row in exported tables.</summary>
        public uint Item => report.item;

        /// <summary>Of its tokens in queries, keys, values and results.</summary>
        public uint FirstRow => report.first_row;
    }

    /// <summary>What a step needs and what there is.</summary>
    public readonly struct ReserveReport
    {
        private readonly kv_reserve_report report;

        internal ReserveReport(kv_reserve_report report)
        {
            this.report = report;
        }

        /// <summary>Blocks needed.</summary>
        public ulong NeedBlocks => report.need_blocks;

        /// <summary>Bytes needed.</summary>
        public ulong NeedBytes => report.need_bytes;

        /// <summary>Could be handed out at once.</summary>
        public ulong FreeBytesNow => report.free_bytes_now;

        /// <summary>With what is parked behind open steps and fences.</summary>
        public ulong FreeBytesAfterFence => report.free_bytes_after_fence;

        /// <summary>The first so many items would have fitted.</summary>
        public uint ItemsThatFit => report.items_that_fit;
    }

    /// <summary>What a step brought when it ended.</summary>
    public readonly struct StepReport
    {
        private readonly kv_step_report report;

        internal StepReport(kv_step_report report)
        {
            this.report = report;
        }

        /// <summary>The step's number, for <see cref="Pool.PassFence"/>.</summary>
        public ulong Fence => report.fence;

        /// <summary>Tokens that became part of their sequences.</summary>
        public ulong AcceptedTokens => report.accepted_tokens;

        /// <summary>Slid out of layers with a window.</summary>
        public ulong WindowBlocksReturned => report.window_blocks_returned;

        /// <summary>Rounds run at this step end, by policy or deferred call.</summary>
        public ulong Compactions => report.compactions;

        /// <summary>Rounds due that had nothing to remove or no statistics.</summary>
        public ulong CompactionsSkipped => report.compactions_skipped;

        /// <summary>To the allocator, in all; some may wait for a fence.</summary>
        public ulong BlocksReturned => report.blocks_returned;

        /// <summary>Of those blocks.</summary>
        public ulong BytesReturned => report.bytes_returned;

        /// <summary>Rounds run because of <see cref="PoolConfig.PressurePercent"/>.</summary>
        public ulong PressureRounds => report.pressure_rounds;

        /// <summary>Of the last round that was skipped; null: none was.</summary>
        public CompressOutcome? LastSkipOutcome => report.last_skip_outcome == 0
            ? (CompressOutcome?)null : (CompressOutcome)report.last_skip_outcome;

        /// <summary>Its status: <see cref="Status.Again"/> when blocks were missing.</summary>
        public Status LastSkipStatus => (Status)report.last_skip_status;

        /// <summary>Coded into the smaller formats of their layers
        /// (<see cref="Layer.DemotedKeyFormat"/>).</summary>
        public ulong DemotedBlocks => report.demoted_blocks;

        /// <summary>How many fewer these take now.</summary>
        public ulong DemotedBytes => report.demoted_bytes;
    }

    /// <summary>What a round of compaction brought: sums over layers, tokens per layer and KV head.
    /// </summary>
    public readonly struct CompressReport
    {
        private readonly kv_compress_report report;

        internal CompressReport(kv_compress_report report)
        {
            this.report = report;
        }

        /// <summary>What was done.</summary>
        public CompressOutcome Outcome => (CompressOutcome)report.outcome;

        /// <summary>Layers compacted.</summary>
        public uint Layers => report.layers;

        /// <summary>Tokens retained before.</summary>
        public ulong TokensBefore => report.tokens_before;

        /// <summary>Tokens retained after.</summary>
        public ulong TokensAfter => report.tokens_after;

        /// <summary>Blocks in the sequence's tables before.</summary>
        public ulong BlocksBefore => report.blocks_before;

        /// <summary>Blocks in the sequence's tables after.</summary>
        public ulong BlocksAfter => report.blocks_after;

        /// <summary>Of those before.</summary>
        public ulong BytesBefore => report.bytes_before;

        /// <summary>Of those after.</summary>
        public ulong BytesAfter => report.bytes_after;

        /// <summary>To the allocator; a block that others still read is not returned.</summary>
        public ulong BlocksReturned => report.blocks_returned;

        /// <summary>Of those blocks.</summary>
        public ulong BytesReturned => report.bytes_returned;

        /// <summary>Fresh blocks, where the old were shared, or of another format.</summary>
        public ulong BlocksCopied => report.blocks_copied;

        /// <summary>Slabs given back to the system by an elastic pool.</summary>
        public ulong SlabsGivenBack => report.slabs_given_back;

        /// <summary>How long the round took.</summary>
        public ulong Nanoseconds => report.nanoseconds;

        /// <summary>Of <see cref="StorageFormat.Kivi4"/> and the like: rows that left a block and
        /// were coded again.</summary>
        public ulong RecodedRows => report.recoded_rows;

        /// <summary>Their change, root mean square, as a share of their own.</summary>
        public double RecodingError => report.recoding_error;

        /// <summary>As in <see cref="RetentionInfo"/>, the mean of the heads that lost
        /// tokens.</summary>
        public double LostAttention => report.lost_attention;
    }

    /// <summary>What rounds have done to one layer and KV head of a sequence.</summary>
    public readonly struct RetentionInfo
    {
        private readonly kv_retention_info report;

        internal RetentionInfo(kv_retention_info report)
        {
            this.report = report;
        }

        /// <summary>Which layer.</summary>
        public uint Layer => report.layer;

        /// <summary>Which of its KV heads.</summary>
        public uint KvHead => report.kv_head;

        /// <summary>That removed tokens here.</summary>
        public ulong Rounds => report.rounds;

        /// <summary>In all of them.</summary>
        public ulong TokensRemoved => report.tokens_removed;

        /// <summary>To the allocator, by the layer, or by the head alone with <see
        /// cref="Kvrt.Layer.LanePerHead"/>.</summary>
        public ulong BlocksReturned => report.blocks_returned;

        /// <summary>Share of the observed attention that the tokens had which the last round
        /// removed: 0 to 1; 0 when the policy observes none.</summary>
        public double LostAttention => report.lost_attention;

        /// <summary>Of all rounds; each is a share of what was there then.</summary>
        public double LostAttentionSum => report.lost_attention_sum;
    }

    /// <summary>What a sequence under a policy takes once its rounds run.</summary>
    public readonly struct PolicyFootprint
    {
        private readonly kv_policy_footprint report;

        internal PolicyFootprint(kv_policy_footprint report)
        {
            this.report = report;
        }

        /// <summary>As asked.</summary>
        public ulong StepTokens => report.step_tokens;

        /// <summary>As asked.</summary>
        public ulong Tokens => report.tokens;

        /// <summary>Per layer and head.</summary>
        public ulong TokensAfterRound => report.tokens_after_round;

        /// <summary>The most before the next round, an open step's included.</summary>
        public ulong TokensSteady => report.tokens_steady;

        /// <summary>Blocks of a sequence that retains so much in every layer.</summary>
        public ulong BlocksSteady => report.blocks_steady;

        /// <summary>Of those blocks.</summary>
        public ulong BytesSteady => report.bytes_steady;
    }
}
