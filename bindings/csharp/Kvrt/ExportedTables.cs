// What kv_step_export says of one layer besides its tables.
using System;
using Kvrt.Native;

namespace Kvrt
{
    /// <summary>How many elements one layer's tables have, and how its blocks lie. Strides of
    /// blocks are in bytes, those inside a block in words; kvrt.h has the formula.</summary>
    public readonly unsafe struct ExportedTables
    {
        private readonly kv_tables report;

        internal ExportedTables(kv_tables report)
        {
            this.report = report;
        }

        /// <summary>Elements that <see cref="TableBuffers.Indices"/> needs.</summary>
        public ulong IndicesCount => report.indices_count;

        /// <summary>Elements that <see cref="TableBuffers.SlotPositions"/> needs.</summary>
        public ulong SlotPositionsCount => report.slot_positions_count;

        /// <summary>Sequences of the step.</summary>
        public uint ItemCount => report.item_count;

        /// <summary>Tokens of the step.</summary>
        public uint TokenCount => report.token_count;

        /// <summary>The longest row of <see cref="TableBuffers.BlockTable"/>.</summary>
        public uint MaxBlocks => report.max_blocks;

        /// <summary>How the tiles of a block lie.</summary>
        public BlockLayout Layout => (BlockLayout)report.layout;

        /// <summary>How keys are stored.</summary>
        public StorageFormat KeyFormat => (StorageFormat)report.key_format;

        /// <summary>How values are stored.</summary>
        public StorageFormat ValueFormat => (StorageFormat)report.value_format;

        /// <summary>Slots of a block.</summary>
        public uint BlockTokens => report.block_tokens;

        /// <summary>Slots of a group.</summary>
        public uint SlotGroup => report.slot_group;

        /// <summary>Where block 0 lies: in device memory, of a pool there.</summary>
        public IntPtr Base => (IntPtr)report.@base;

        /// <summary>Bytes per block id.</summary>
        public long BlockStride => report.block_stride;

        /// <summary>Bytes of a block.</summary>
        public long BlockBytes => report.block_bytes;

        /// <summary>Bytes from the block to its keys.</summary>
        public long KeyOffset => report.key_offset;

        /// <summary>Bytes from the block to its values.</summary>
        public long ValueOffset => report.value_offset;

        /// <summary>Words from one group of keys to the next.</summary>
        public long KeyStrideGroup => report.key_stride_group;

        /// <summary>Words from one slot of keys to the next.</summary>
        public long KeyStrideSlot => report.key_stride_slot;

        /// <summary>Words from one head of keys to the next.</summary>
        public long KeyStrideHead => report.key_stride_head;

        /// <summary>Words from one word of a row of keys to the next.</summary>
        public long KeyStrideDim => report.key_stride_dim;

        /// <summary>Words from one group of values to the next.</summary>
        public long ValueStrideGroup => report.value_stride_group;

        /// <summary>Words from one slot of values to the next.</summary>
        public long ValueStrideSlot => report.value_stride_slot;

        /// <summary>Words from one head of values to the next.</summary>
        public long ValueStrideHead => report.value_stride_head;

        /// <summary>Words from one word of a row of values to the next.</summary>
        public long ValueStrideDim => report.value_stride_dim;

        /// <summary>[kv_heads] static ones; zero: the format has none.</summary>
        public IntPtr KeyScales => (IntPtr)report.key_scales;

        /// <summary>[kv_heads] static ones; zero: the format has none.</summary>
        public IntPtr ValueScales => (IntPtr)report.value_scales;

        /// <summary>The step's number, for <see cref="Pool.PassFence"/>, also if it is cancelled.
        /// </summary>
        public ulong Fence => report.fence;

        /// <summary>Words of a row of keys.</summary>
        public uint KeyWords => report.key_words;

        /// <summary>Words of a row of values.</summary>
        public uint ValueWords => report.value_words;

        /// <summary>Bytes of a word of keys: of an element, in plain formats.</summary>
        public uint KeyWordBytes => report.key_word_bytes;

        /// <summary>Bytes of a word of values: of an element, in plain formats.</summary>
        public uint ValueWordBytes => report.value_word_bytes;

        /// <summary>How keys of the first <see cref="TableBuffers.SealedBlocks"/> of an item are
        /// stored, which are not to be written: coded whole in <see cref="StorageFormat.Kivi4"/>
        /// and the like, row by row with <see cref="Layer.DemotedKeyFormat"/>. All else, but for
        /// what is called sealed, is about the blocks behind them, where new rows go. In other
        /// layers nothing is sealed.</summary>
        public StorageFormat SealedKeyFormat => (StorageFormat)report.sealed_key_format;

        /// <summary>How values of sealed blocks are stored.</summary>
        public StorageFormat SealedValueFormat => (StorageFormat)report.sealed_value_format;

        /// <summary>Bytes of a sealed block.</summary>
        public long SealedBlockBytes => report.sealed_block_bytes;

        /// <summary>Bytes from a sealed block to its first head's keys.</summary>
        public long SealedKeyOffset => report.sealed_key_offset;

        /// <summary>Bytes from a sealed block to its first head's values.</summary>
        public long SealedValueOffset => report.sealed_value_offset;

        /// <summary>Bytes from a head's keys in a sealed block to the next one's.</summary>
        public long SealedKeyHeadBytes => report.sealed_key_head_bytes;

        /// <summary>Bytes from a head's values in a sealed block to the next one's.</summary>
        public long SealedValueHeadBytes => report.sealed_value_head_bytes;

        /// <summary>A hash of what the bytes of keys depend on besides the keys: where it is equal,
        /// rows of one pool can be read in another.</summary>
        public ulong KeyIdentity => report.key_identity;

        /// <summary>The same of values.</summary>
        public ulong ValueIdentity => report.value_identity;

        /// <summary>Whose all this is, with <see cref="Layer.LanePerHead"/>; else 0.</summary>
        public uint KvHead => report.kv_head;

        /// <summary>Words of a row of keys in a sealed block; 0 where keys are coded
        /// whole, as are their bytes and strides.</summary>
        public uint SealedKeyWords => report.sealed_key_words;

        /// <summary>Words of a row of values in a sealed block; 0 where values are coded
        /// whole, as are their bytes and strides.</summary>
        public uint SealedValueWords => report.sealed_value_words;

        /// <summary>Bytes of a word of keys in a sealed block.</summary>
        public uint SealedKeyWordBytes => report.sealed_key_word_bytes;

        /// <summary>Bytes of a word of values in a sealed block.</summary>
        public uint SealedValueWordBytes => report.sealed_value_word_bytes;

        /// <summary>Words from one group of keys in a sealed block to the next.</summary>
        public long SealedKeyStrideGroup => report.sealed_key_stride_group;

        /// <summary>Words from one slot of keys in a sealed block to the next.</summary>
        public long SealedKeyStrideSlot => report.sealed_key_stride_slot;

        /// <summary>Words from one head of keys in a sealed block to the next.</summary>
        public long SealedKeyStrideHead => report.sealed_key_stride_head;

        /// <summary>Words from one word of a row of keys in a sealed block to the next.</summary>
        public long SealedKeyStrideDim => report.sealed_key_stride_dim;

        /// <summary>Words from one group of values in a sealed block to the next.</summary>
        public long SealedValueStrideGroup => report.sealed_value_stride_group;

        /// <summary>Words from one slot of values in a sealed block to the next.</summary>
        public long SealedValueStrideSlot => report.sealed_value_stride_slot;

        /// <summary>Words from one head of values in a sealed block to the next.</summary>
        public long SealedValueStrideHead => report.sealed_value_stride_head;

        /// <summary>Words from one word of a row of values in a sealed block to the next.</summary>
        public long SealedValueStrideDim => report.sealed_value_stride_dim;

        /// <summary>[kv_heads] static ones of sealed keys; zero: the format has none.</summary>
        public IntPtr SealedKeyScales => (IntPtr)report.sealed_key_scales;

        /// <summary>[kv_heads] static ones of sealed values; zero: the format has none.</summary>
        public IntPtr SealedValueScales => (IntPtr)report.sealed_value_scales;
    }
}
