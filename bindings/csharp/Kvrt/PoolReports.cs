// What calls on pools tell: views of the structs that the library filled.
using System.Collections.Generic;
using Kvrt.Native;

namespace Kvrt
{
    /// <summary>Counters of a pool, of one moment. Total = Free + Cached + Pinned + Parked +
    /// Loading. </summary>
    public readonly struct PoolStats
    {
        private readonly kv_pool_stats report;

        internal PoolStats(kv_pool_stats report)
        {
            this.report = report;
        }

        /// <summary>Size of a slab.</summary>
        public ulong SlabBytes => report.slab_bytes;

        /// <summary>Slabs of the arena.</summary>
        public ulong SlabsTotal => report.slabs_total;

        /// <summary>Slabs without blocks.</summary>
        public ulong SlabsFree => report.slabs_free;

        /// <summary>Slabs backed by memory now.</summary>
        public ulong SlabsResident => report.slabs_resident;

        /// <summary>All slabs.</summary>
        public ulong ArenaBytes => report.arena_bytes;

        /// <summary>Of pinned blocks.</summary>
        public ulong LiveBytes => report.live_bytes;

        /// <summary>Pinned blocks.</summary>
        public ulong LiveBlocks => report.live_blocks;

        /// <summary>The most that were pinned at once.</summary>
        public ulong PeakLiveBlocks => report.peak_live_blocks;

        /// <summary>Blocks, over all classes.</summary>
        public ulong Total => report.total;

        /// <summary>Blocks that can be handed out.</summary>
        public ulong Free => report.free;

        /// <summary>Blocks kept for a prefix.</summary>
        public ulong Cached => report.cached;

        /// <summary>Blocks in use.</summary>
        public ulong Pinned => report.pinned;

        /// <summary>Blocks that wait for a fence.</summary>
        public ulong Parked => report.parked;

        /// <summary>Blocks being filled.</summary>
        public ulong Loading => report.loading;

        /// <summary>Since creation.</summary>
        public ulong BlocksAllocated => report.blocks_allocated;

        /// <summary>Since creation.</summary>
        public ulong BlocksReturned => report.blocks_returned;

        /// <summary>Since creation.</summary>
        public ulong BytesReturned => report.bytes_returned;

        /// <summary>Since creation.</summary>
        public ulong BlocksReturnedByCompaction => report.blocks_returned_by_compaction;

        /// <summary>Since creation.</summary>
        public ulong BytesReturnedByCompaction => report.bytes_returned_by_compaction;

        /// <summary>Rounds that removed something.</summary>
        public ulong Compactions => report.compactions;

        /// <summary>Rounds due that did not.</summary>
        public ulong CompactionsSkipped => report.compactions_skipped;

        /// <summary>To the system, by an elastic pool.</summary>
        public ulong SlabsGivenBack => report.slabs_given_back;

        /// <summary>Steps that ended.</summary>
        public ulong StepsEnded => report.steps_ended;

        /// <summary>Steps that were cancelled.</summary>
        public ulong StepsCancelled => report.steps_cancelled;

        /// <summary>Tokens accepted.</summary>
        public ulong TokensAccepted => report.tokens_accepted;

        /// <summary>Through the allocator hook or the library's own allocator.</summary>
        public ulong HostAllocations => report.host_allocations;

        /// <summary>Sequences alive.</summary>
        public uint Sequences => report.sequences;

        /// <summary>Steps open.</summary>
        public uint OpenSteps => report.open_steps;

        /// <summary>Classes of blocks.</summary>
        public uint Classes => report.classes;

        /// <summary>Host memory besides the arena.</summary>
        public ulong MetadataBytes => report.metadata_bytes;
    }

    /// <summary>Counters of one class of blocks, of one moment.</summary>
    public readonly struct ClassStats
    {
        private readonly kv_class_stats report;

        internal ClassStats(kv_class_stats report)
        {
            this.report = report;
        }

        /// <summary>Size of a block.</summary>
        public ulong BlockBytes => report.block_bytes;

        /// <summary>Blocks in a slab.</summary>
        public ulong BlocksPerSlab => report.blocks_per_slab;

        /// <summary>Slabs that the class holds now.</summary>
        public ulong Slabs => report.slabs;

        /// <summary>Blocks carved from those slabs.</summary>
        public ulong Total => report.total;

        /// <summary>Blocks that can be handed out.</summary>
        public ulong Free => report.free;

        /// <summary>Blocks kept for a prefix.</summary>
        public ulong Cached => report.cached;

        /// <summary>Blocks in use.</summary>
        public ulong Pinned => report.pinned;

        /// <summary>Blocks that wait for a fence.</summary>
        public ulong Parked => report.parked;

        /// <summary>Blocks being filled.</summary>
        public ulong Loading => report.loading;
    }

    /// <summary>Counters of one layer since the pool's creation. Saturated are elements that were
    /// beyond the largest number of their format and scale, and were stored as that
    /// number.</summary>
    public readonly struct LayerStats
    {
        internal LayerStats(
            ulong[] saturatedKeys, ulong[] saturatedValues, ulong recodedRows, double recodingError)
        {
            SaturatedKeys = saturatedKeys;
            SaturatedValues = saturatedValues;
            RecodedRows = recodedRows;
            RecodingError = recodingError;
        }

        /// <summary>[kv_heads]: elements of keys.</summary>
        public IReadOnlyList<ulong> SaturatedKeys { get; }

        /// <summary>[kv_heads]: elements of values.</summary>
        public IReadOnlyList<ulong> SaturatedValues { get; }

        /// <summary>Of <see cref="StorageFormat.Kivi4"/> and the like: rows that left a block and
        /// were coded again, by compaction or after a sequence went back.</summary>
        public ulong RecodedRows { get; }

        /// <summary>Their change, root mean square, as a share of their own.</summary>
        public double RecodingError { get; }
    }

    /// <summary>What a configuration needs, and what it holds.</summary>
    public readonly struct PlanReport
    {
        private readonly kv_plan_report report;

        internal PlanReport(kv_plan_report report)
        {
            this.report = report;
        }

        /// <summary>How many were asked for.</summary>
        public ulong Sequences => report.sequences;

        /// <summary>How long each was asked to be.</summary>
        public ulong TokensPerSequence => report.tokens_per_sequence;

        /// <summary>Over all layers, full blocks, windows not yet full.</summary>
        public ulong BytesPerToken => report.bytes_per_token;

        /// <summary>Of that length, whole blocks, windows respected.</summary>
        public ulong BytesPerSequence => report.bytes_per_sequence;

        /// <summary>For all those sequences, whole slabs.</summary>
        public ulong ArenaBytesNeeded => report.arena_bytes_needed;

        /// <summary>Of that length in the configuration's arena.</summary>
        public ulong SequencesThatFit => report.sequences_that_fit;

        /// <summary>Of one sequence alone in the configuration's arena.</summary>
        public ulong TokensThatFit => report.tokens_that_fit;

        /// <summary>Host memory that the pool will allocate.</summary>
        public ulong MetadataBytes => report.metadata_bytes;

        /// <summary>A block's tokens of one sequence, over all layers.</summary>
        public ulong BytesPerBlock => report.bytes_per_block;

        /// <summary>Of that length, over all layers.</summary>
        public ulong BlocksPerSequence => report.blocks_per_sequence;

        /// <summary>What a token adds to a sequence whose windows are full.</summary>
        public ulong FullBytesPerToken => report.full_bytes_per_token;

        /// <summary>Of full windows, and blocks that KIVI and KVARN still keep raw.
        /// </summary>
        public ulong ConstantBytesPerSequence => report.constant_bytes_per_sequence;

        /// <summary>Of each of <see cref="Sequences"/> in the configuration's arena.</summary>
        public ulong TokensThatFitEach => report.tokens_that_fit_each;

        /// <summary>The configuration's arena over <see cref="BytesPerToken"/>.</summary>
        public ulong TokensByBytes => report.tokens_by_bytes;

        /// <summary>The one that the last two are of.</summary>
        public uint Layer => report.layer;

        /// <summary>0: it shares another's cache.</summary>
        public ulong LayerBytesPerBlock => report.layer_bytes_per_block;

        /// <summary>Of that length.</summary>
        public ulong LayerBytesPerSequence => report.layer_bytes_per_sequence;
    }
}
