// Pools on a CUDA device (PoolConfig.Device): which one it is, the streams of their steps, tables
// and tensors in its memory.
using System;
using System.Runtime.CompilerServices;
using Kvrt.Native;

namespace Kvrt
{
    /// <summary>The device that pools are made on: the one that is current for the calling thread,
    /// or the first. From <see cref="Find"/>.</summary>
    public sealed class CudaDevice
    {
        private unsafe CudaDevice(kv_cuda_device device)
        {
            Name = Library.Text(device.name);
            WithoutKernels = device.has_kernels != 0 ? null : Library.Text(device.reason);
            MemoryBytes = device.memory_bytes;
            Ordinal = device.ordinal;
            ComputeMajor = device.compute_major;
            ComputeMinor = device.compute_minor;
            Multiprocessors = device.multiprocessors;
            DriverVersion = device.driver_version;
            IsElastic = device.elastic != 0;
        }

        /// <summary>Its name.</summary>
        public string Name { get; }

        /// <summary>Why pools there have no kernels; null: they have.</summary>
        public string WithoutKernels { get; }

        /// <summary>All of its memory.</summary>
        public ulong MemoryBytes { get; }

        /// <summary>Its number, as the driver counts.</summary>
        public uint Ordinal { get; }

        /// <summary>Compute capability, before the point.</summary>
        public uint ComputeMajor { get; }

        /// <summary>Compute capability, behind the point.</summary>
        public uint ComputeMinor { get; }

        /// <summary>How many multiprocessors it has.</summary>
        public uint Multiprocessors { get; }

        /// <summary>13000: made for CUDA 13.0.</summary>
        public uint DriverVersion { get; }

        /// <summary>Whether it can map memory piece by piece, as
        /// <see cref="PoolOptions.Elastic"/> needs.</summary>
        public bool IsElastic { get; }

        /// <summary>What there is; throws with what is missing (<see cref="Status.Unsupported"/>:
        /// the plugin, the driver or a device). Loads the driver and starts it: processes forked
        /// from this one afterwards cannot use CUDA.</summary>
        public static CudaDevice Find()
        {
            NativeLoader.Load();
            return FindLoaded();
        }

        [MethodImpl(MethodImplOptions.NoInlining)] // compiled once the library is there
        private static unsafe CudaDevice FindLoaded()
        {
            kv_cuda_device device = default;
            device.struct_size = (uint)sizeof(kv_cuda_device);
            int status = NativeCudaMethods.kv_cuda_get_device(&device);
            if (status < 0)
            {
                KvrtException.Throw(status, null);
            }
            return new CudaDevice(device);
        }
    }

    /// <summary>Whose device memory a pool lives in: native functions, as allocate and release of
    /// kv_cuda_memory in kv_cuda.h, and what they get as user. They stay until the pool is disposed
    /// and all calls have left it.</summary>
    public readonly struct CudaAllocator
    {
        /// <summary>Of these functions.</summary>
        public CudaAllocator(IntPtr user, IntPtr allocate, IntPtr release)
        {
            User = user;
            Allocate = allocate;
            Release = release;
        }

        /// <summary>Their first argument.</summary>
        public IntPtr User { get; }

        /// <summary>void* (*)(void* user, size_t bytes, size_t alignment)</summary>
        public IntPtr Allocate { get; }

        /// <summary>void (*)(void* user, void* memory, size_t bytes, size_t alignment)</summary>
        public IntPtr Release { get; }
    }

    /// <summary>[rows, heads, dim] in the memory of the pool's device, from an address on, dense or
    /// with strides in elements. Nobody can check that it is there.</summary>
    public readonly struct DeviceTensor
    {
        private readonly kv_tensor native;

        /// <summary>With strides; all 0: dense.</summary>
        public unsafe DeviceTensor(
            IntPtr address, DataType type, ulong rows, ulong heads, ulong dim, long rowStride = 0,
            long headStride = 0, long dimStride = 0)
        {
            native = default;
            native.struct_size = (uint)sizeof(kv_tensor);
            native.data = (void*)address;
            native.dtype = (uint)type;
            native.rows = rows;
            native.heads = heads;
            native.dim = dim;
            native.row_stride = rowStride;
            native.head_stride = headStride;
            native.dim_stride = dimStride;
        }

        internal kv_tensor Native => native;
    }

    /// <summary>Addresses of a step's tables in device memory, filled as
    /// <see cref="Step.Export(uint, in TableBuffers, uint)"/> fills them on the host. They stay:
    /// kernels on them can be captured in a graph, one for each place.</summary>
    public readonly unsafe struct CudaTables
    {
        private readonly kv_cuda_tables tables;

        internal CudaTables(kv_cuda_tables tables)
        {
            this.tables = tables;
        }

        /// <summary>Which of the two sets, for the two steps that can be open: 0 or 1.</summary>
        public uint Place => tables.place;

        /// <summary>[max step sequences, BlockTableStride] of int; -1 behind a row's end.</summary>
        public IntPtr BlockTable => (IntPtr)tables.block_table;

        /// <summary>Elements from row to row of the block table.</summary>
        public ulong BlockTableStride => tables.block_table_stride;

        /// <summary>[max step tokens] of long; -1: no row.</summary>
        public IntPtr SlotMapping => (IntPtr)tables.slot_mapping;

        /// <summary>[max step sequences + 1] of int.</summary>
        public IntPtr QueryStart => (IntPtr)tables.query_start;

        /// <summary>[max step sequences] of int; 0: no item.</summary>
        public IntPtr KvLen => (IntPtr)tables.kv_len;

        /// <summary>[max step tokens] of int.</summary>
        public IntPtr Positions => (IntPtr)tables.positions;
    }

    /// <summary>How keys were scored by TriAttention so far, and are.</summary>
    public sealed class CudaScoringReport
    {
        internal unsafe CudaScoringReport(kv_cuda_scoring_report report)
        {
            Method = (CudaScoreMethod)report.method;
            Tf32 = (report.scoring_flags & NativeConstants.KV_CUDA_SCORING_TF32) != 0;
            LibraryVersion = report.library_version;
            WorkspaceBytes = report.workspace_bytes;
            KernelCohorts = report.kernel_cohorts;
            ProductCohorts = report.product_cohorts;
            ShapeHits = report.shape_hits;
            ShapeMisses = report.shape_misses;
            KernelKinds = report.kernel_kinds;
            ProductKinds = report.product_kinds;
            OpenKinds = report.open_kinds;
            Reason = Library.Text(report.reason);
        }

        /// <summary>Who scores.</summary>
        public CudaScoreMethod Method { get; }

        /// <summary>Whether products round keys and weights to 11 bits.</summary>
        public bool Tf32 { get; }

        /// <summary>As cublasLtGetVersion counts; 0: products were never asked for.</summary>
        public uint LibraryVersion { get; }

        /// <summary>Of device memory that products have.</summary>
        public ulong WorkspaceBytes { get; }

        /// <summary>Lanes of one kind that the kernel has scored together.</summary>
        public ulong KernelCohorts { get; }

        /// <summary>The same by products.</summary>
        public ulong ProductCohorts { get; }

        /// <summary>Of products: descriptors that were there.</summary>
        public ulong ShapeHits { get; }

        /// <summary>Of products: descriptors that were made.</summary>
        public ulong ShapeMisses { get; }

        /// <summary>Kinds of work that are the kernel's.</summary>
        public uint KernelKinds { get; }

        /// <summary>Kinds of work that are the products'.</summary>
        public uint ProductKinds { get; }

        /// <summary>Kinds of work that are still being timed.</summary>
        public uint OpenKinds { get; }

        /// <summary>Why a measured round last was the kernel's without being timed; or "".
        /// </summary>
        public string Reason { get; }
    }

    public sealed unsafe partial class Pool
    {
        /// <summary>Who scores keys by TriAttention, from the next round on. What products take
        /// (workspaceBytes of device memory; 0: the library's choice) stays until the pool is
        /// disposed. tf32: products may round keys and weights to 11 bits.</summary>
        public void SetCudaScoring(CudaScoreMethod method, ulong workspaceBytes = 0,
                                   bool tf32 = false)
        {
            kv_cuda_scoring scoring = default;
            scoring.struct_size = (uint)sizeof(kv_cuda_scoring);
            scoring.flags = tf32 ? NativeConstants.KV_CUDA_SCORING_TF32 : 0;
            scoring.method = (uint)method;
            scoring.workspace_bytes = workspaceBytes;
            int status;
            PoolLease lease = Enter();
            try
            {
                status = NativeCudaMethods.kv_cuda_pool_set_scoring(lease.Pool, &scoring);
            }
            finally
            {
                lease.Release();
            }
            Finish(status);
        }

        /// <summary>How keys are scored by TriAttention, and were.</summary>
        public CudaScoringReport GetCudaScoring()
        {
            kv_cuda_scoring_report report = default;
            report.struct_size = (uint)sizeof(kv_cuda_scoring_report);
            int status;
            PoolLease lease = Enter();
            try
            {
                status = NativeCudaMethods.kv_cuda_pool_get_scoring(lease.Pool, &report);
            }
            finally
            {
                lease.Release();
            }
            Finish(status);
            return new CudaScoringReport(report);
        }

        /// <summary>Whether its tensors and blocks are in device memory.</summary>
        internal bool OnCuda { get; }

        /// <summary>As <see cref="SetScores"/>, for [kv_heads, tokens] scores of f32 at an address
        /// in device memory, which are read behind all that `stream` has. Nobody can check that
        /// they are there.</summary>
        public void SetCudaScores(
            Sequence sequence, uint layer, ulong first, ulong tokens, IntPtr scores, IntPtr stream)
        {
            int status;
            PoolLease lease = Enter();
            try
            {
                status = NativeCudaMethods.kv_cuda_seq_set_scores(
                    lease.Pool, sequence.Handle, layer, first, tokens, (float*)scores, stream);
            }
            finally
            {
                lease.Release();
            }
            Finish(status);
        }

        /// <summary>Bytes of device memory behind the arena now.</summary>
        public ulong GetCudaMemory()
        {
            ulong bytes = 0;
            int status;
            PoolLease lease = Enter();
            try
            {
                status = NativeCudaMethods.kv_cuda_pool_memory(lease.Pool, &bytes);
            }
            finally
            {
                lease.Release();
            }
            Finish(status);
            return bytes;
        }
    }

    public readonly unsafe partial struct Step
    {
        /// <summary>The stream that all of the step's work goes to, before Reserve: a CUstream or
        /// cudaStream_t of the device's primary context, not the default one, which lives until
        /// that work is done.</summary>
        public void UseCudaStream(IntPtr stream)
        {
            int status;
            PoolLease lease = Enter();
            try
            {
                status = NativeCudaMethods.kv_cuda_step_use_stream(slot.Handle, stream);
            }
            finally
            {
                lease.Release();
            }
            pool.Finish(status);
        }

        /// <summary>Where the tables of a layer's lane are, from Reserve until the step's end.
        /// kvHead is 0 but with <see cref="Layer.LanePerHead"/>. The layer counts as written.
        /// `attended`: the step replays a graph in which the layer's attention was captured with
        /// statistics, so that what it observes and gathers counts.</summary>
        public CudaTables GetCudaTables(uint layer, uint kvHead = 0, bool attended = false)
        {
            kv_cuda_tables tables = default;
            tables.struct_size = (uint)sizeof(kv_cuda_tables);
            tables.flags = attended ? NativeConstants.KV_CUDA_TABLES_ATTENDED : 0;
            tables.kv_head = kvHead;
            int status;
            PoolLease lease = Enter();
            try
            {
                status = NativeCudaMethods.kv_cuda_step_tables(slot.Handle, layer, &tables);
            }
            finally
            {
                lease.Release();
            }
            pool.Finish(status);
            return new CudaTables(tables);
        }

        /// <summary>Write, of tensors in device memory: enqueued on the step's stream. They stay
        /// until it is done.</summary>
        public void WriteOnDevice(uint layer, in DeviceTensor keys, in DeviceTensor values)
        {
            CheckDevice(true);
            kv_tensor nativeKeys = keys.Native, nativeValues = values.Native;
            int status;
            PoolLease lease = Enter();
            try
            {
                status = NativeMethods.kv_write(slot.Handle, layer, &nativeKeys, &nativeValues);
            }
            finally
            {
                lease.Release();
            }
            pool.Finish(status);
        }

        /// <summary>Attend, of tensors in device memory: enqueued on the step's stream. logSumExp
        /// is the address of [rows, query_heads] of float, or zero.</summary>
        public void AttendOnDevice(
            uint layer, in DeviceTensor queries, in DeviceTensor results,
            IntPtr logSumExp = default)
        {
            CheckDevice(true);
            kv_tensor nativeQueries = queries.Native, nativeResults = results.Native;
            kv_attend_options options = default;
            options.struct_size = (uint)sizeof(kv_attend_options);
            options.log_sum_exp = (float*)logSumExp;
            int status;
            PoolLease lease = Enter();
            try
            {
                status = NativeMethods.kv_attend(
                    slot.Handle, layer, &nativeQueries, &nativeResults, &options);
            }
            finally
            {
                lease.Release();
            }
            pool.Finish(status);
        }

        /// <summary>Kernels must not follow addresses of spans, nor the CPU those of the device.
        /// </summary>
        private void CheckDevice(bool onCuda)
        {
            if (pool == null || pool.OnCuda == onCuda)
            {
                return;
            }
            throw new KvrtArgumentException(Status.Invalid, onCuda
                ? "the pool is on the CPU: tensors of device memory are for one on Device.Cuda"
                : "the pool is on Device.Cuda: its tensors are in device memory (WriteOnDevice, " +
                  "AttendOnDevice)");
        }
    }
}
