// Export of tables: a kernel of the test's own reads the blocks that the tables name.
using System;
using System.Linq;

namespace Kvrt.Tests
{
    internal static unsafe class ExportTests
    {
        [Test]
        public static void TablesLeadToTheKeysAndValues()
        {
            foreach (BlockLayout layout in new[]
                     { BlockLayout.Native, BlockLayout.Hnd, BlockLayout.Nhd })
            {
                using (var engine = new Engine(config => config.Layout = layout,
                                               layer => layer.KeyFormat = StorageFormat.Float32))
                {
                    Sequence[] sequences =
                        { engine.Pool.CreateSequence(), engine.Pool.CreateSequence() };
                    engine.Run(sequences[0], 1, 20);
                    engine.Run(sequences[1], 2, 40);
                    using (Step step = engine.Pool.BeginStep())
                    {
                        step.AppendBatch(sequences, new uint[] { 1, 2 });
                        step.Reserve();
                        CheckTables(step, layout);
                    }
                }
            }
        }

        private static void CheckTables(Step step, BlockLayout layout)
        {
            var blockTable = new int[2 * 4];
            int[] indptr = new int[3], queryStart = new int[3], slotIndptr = new int[3];
            int[] indices = new int[5], slotPositions = new int[2 * 63];
            int[] lastPageLen = new int[2], kvLen = new int[2], positions = new int[3];
            var slotMapping = new long[3];
            var buffers = new TableBuffers
            {
                BlockTable = blockTable, BlockTableStride = 4, Indptr = indptr, Indices = indices,
                LastPageLen = lastPageLen, SlotMapping = slotMapping, QueryStart = queryStart,
                KvLen = kvLen, Positions = positions, SlotPositions = slotPositions,
                SlotIndptr = slotIndptr
            };
            ExportedTables tables = step.Export(1, buffers);
            Check.Equal(2u, tables.ItemCount, "items");
            Check.Equal(3u, tables.TokenCount, "tokens");
            Check.Equal(3u, tables.MaxBlocks, "longest row");
            Check.Equal(5UL, tables.IndicesCount, "indices");
            Check.Equal(126UL, tables.SlotPositionsCount, "positions of slots");
            Check.Equal(layout, tables.Layout, "layout");
            Check.Equal(StorageFormat.Float32, tables.ValueFormat, "format of values");
            Check.Equal(16u, tables.BlockTokens, "block tokens");
            Check.Equal(IntPtr.Zero, tables.KeyScales, "scales");
            Check.Equal(Engine.Dim, tables.KeyWords, "words of a row of keys");
            Check.Equal(Engine.Dim, tables.ValueWords, "words of a row of values");
            Check.Equal(4u, tables.KeyWordBytes, "bytes of a word of keys");
            Check.Equal(4u, tables.ValueWordBytes, "bytes of a word of values");
            Check.Equal(3UL, tables.Fence, "fence: the third step");
            Check.SameElements(new[] { 0, 2, 5 }, indptr, "indptr");
            Check.SameElements(new[] { 0, 1, 3 }, queryStart, "query_start");
            Check.SameElements(new[] { 0, 21, 63 }, slotIndptr, "slot_indptr");
            Check.SameElements(new[] { 21, 42 }, kvLen, "kv_len");
            Check.SameElements(new[] { 5, 10 }, lastPageLen, "last_page_len");
            Check.SameElements(new[] { 20, 40, 41 }, positions, "positions");
            Check.SameElements(
                new[] { indices[0], indices[1], -1, -1, indices[2], indices[3], indices[4], -1 },
                blockTable, "block_table");
            Check.SameElements(
                new[] { indices[1] * 16L + 4, indices[4] * 16L + 8, indices[4] * 16L + 9 },
                slotMapping, "slot_mapping");
            int[] ascending = Enumerable.Range(0, 21).Concat(Enumerable.Range(0, 42)).ToArray();
            Check.SameElements(ascending.Concat(ascending), slotPositions, "slot_positions");
            CheckBlocks(tables, indices);
        }

        /// <summary>Token 17 of the first sequence, token 33 of the second: every
        /// element.</summary>
        private static void CheckBlocks(in ExportedTables tables, int[] indices)
        {
            float[][] expected =
            {
                Engine.Row(0, 1, 17, 1), Engine.Row(1, 1, 17, 1),
                Engine.Row(0, 2, 33, 1), Engine.Row(1, 2, 33, 1)
            };
            for (int i = 0; i < 2 * Engine.Dim; ++i)
            {
                int head = i / (int)Engine.Dim, dim = i % (int)Engine.Dim;
                Check.Equal(expected[0][i], Key(tables, indices[1], 1, head, dim), "first key");
                Check.Equal(expected[1][i], Value(tables, indices[1], 1, head, dim), "first value");
                Check.Equal(expected[2][i], Key(tables, indices[4], 1, head, dim), "second key");
                Check.Equal(expected[3][i], Value(tables, indices[4], 1, head, dim), "its value");
            }
        }

        private static float Key(in ExportedTables t, int block, int slot, int head, int dim)
        {
            byte* keys = (byte*)t.Base + block * t.BlockStride + t.KeyOffset;
            return ((float*)keys)[slot / t.SlotGroup * t.KeyStrideGroup +
                                  slot % t.SlotGroup * t.KeyStrideSlot + head * t.KeyStrideHead +
                                  dim * t.KeyStrideDim];
        }

        private static float Value(in ExportedTables t, int block, int slot, int head, int dim)
        {
            byte* values = (byte*)t.Base + block * t.BlockStride + t.ValueOffset;
            return ((float*)values)[slot / t.SlotGroup * t.ValueStrideGroup +
                                    slot % t.SlotGroup * t.ValueStrideSlot +
                                    head * t.ValueStrideHead + dim * t.ValueStrideDim];
        }

        /// <summary>Each buffer in turn is one element short; nothing behind it is
        /// written.</summary>
        [Test]
        public static void BuffersThatAreTooSmallAreRefused()
        {
            using (var engine = new Engine())
            {
                Sequence[] sequences =
                    { engine.Pool.CreateSequence(), engine.Pool.CreateSequence() };
                using (Step step = engine.Pool.BeginStep())
                {
                    step.AppendBatch(sequences, new uint[] { 20, 3 });
                    Check.Fails(Status.Invalid, "", () => step.Export(0, default)); // not reserved
                    step.Reserve();
                    int[] needed = { 2 * 2, 3, 3, 2, 23, 3, 2, 23, 2 * 23, 3 };
                    for (int shortOne = 0; shortOne < needed.Length; ++shortOne)
                    {
                        CheckShort(step, needed, shortOne);
                    }
                    Check.True(step.TryExport(0, Buffers(Arrays(needed, -1), new long[23]), out _),
                               "all as large as needed");
                    Check.Fails(Status.Invalid, "layer 2", () => step.Export(2, default));
                }
            }
        }

        private static int[][] Arrays(int[] needed, int shortOne)
        {
            return needed.Select((length, i) => Enumerable.Repeat(
                -9, i == shortOne ? length - 1 : length).ToArray()).ToArray();
        }

        private static TableBuffers Buffers(int[][] arrays, long[] slotMapping)
        {
            return new TableBuffers
            {
                BlockTable = arrays[0], BlockTableStride = 2, Indptr = arrays[1],
                Indices = arrays[2], LastPageLen = arrays[3], SlotMapping = slotMapping,
                QueryStart = arrays[5], KvLen = arrays[6], Positions = arrays[7],
                SlotPositions = arrays[8], SlotIndptr = arrays[9]
            };
        }

        private static void CheckShort(Step step, int[] needed, int shortOne)
        {
            int[][] arrays = Arrays(needed, shortOne);
            var mapping = new long[shortOne == 4 ? 22 : 23];
            Check.True(!step.TryExport(0, Buffers(arrays, mapping), out ExportedTables tables),
                       $"buffer {shortOne} is one short");
            Check.Equal(3UL, tables.IndicesCount, "indices needed");
            Check.Equal(46UL, tables.SlotPositionsCount, "positions of slots needed");
            Check.True(arrays.All(array => array.All(element => element == -9)) &&
                       mapping.All(element => element == 0), "nothing was written");
            KvrtCapacityException error = Check.Throws<KvrtCapacityException>(
                () => step.Export(0, Buffers(arrays, mapping)), "Export");
            Check.Equal(Status.Limit, error.Status, "status");
        }

        [Test]
        public static void AnExportedLayerCountsAsWritten()
        {
            using (var engine = new Engine())
            {
                Sequence sequence = engine.Pool.CreateSequence();
                using (Step step = engine.Pool.BeginStep())
                {
                    step.Append(sequence, 4);
                    step.Reserve();
                    step.Export(0, default);
                    step.Export(1, default);
                    step.End();
                }
                Check.Equal(4UL, engine.Pool.GetInfo(sequence).Accepted, "accepted");
            }
        }
    }
}
