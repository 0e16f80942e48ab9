// The raw layer against the golden files of the C interface: functions, structs, constants.
using System;
using System.Collections.Generic;
using System.IO;
using System.Linq;
using System.Reflection;
using System.Runtime.InteropServices;
using Kvrt.Native;

namespace Kvrt.Tests
{
    internal static class AbiTests
    {
        private static string[] Golden(string file)
        {
            string folder = Environment.GetEnvironmentVariable("KVRT_GOLDEN_DIR");
            Check.True(!string.IsNullOrEmpty(folder), "KVRT_GOLDEN_DIR is not set");
            return File.ReadAllLines(Path.Combine(folder, file));
        }

        /// <summary>Names what is missing on either side, and then compares the order.</summary>
        private static void SameLines(string[] golden, string[] actual, string what)
        {
            string missing = string.Join(", ", golden.Except(actual));
            string unknown = string.Join(", ", actual.Except(golden));
            Check.Equal("", missing, $"{what}: missing here");
            Check.Equal("", unknown, $"{what}: unknown to the header");
            Check.SameElements(golden, actual, what);
        }

        private static MethodInfo[] Functions()
        {
            return FunctionsOf(typeof(NativeMethods))
                .Concat(FunctionsOf(typeof(NativeCudaMethods))).ToArray();
        }

        private static MethodInfo[] FunctionsOf(Type type)
        {
            return type.GetMethods(BindingFlags.Static | BindingFlags.Public)
                .Where(method => method.IsDefined(typeof(DllImportAttribute), false)).ToArray();
        }

        [Test]
        public static void EveryFunctionIsDeclared()
        {
            Declares(typeof(NativeMethods), "symbols.txt");
            Declares(typeof(NativeCudaMethods), "cuda_symbols.txt");
        }

        private static void Declares(Type type, string file)
        {
            SameLines(Golden(file), FunctionsOf(type).Select(function => function.Name)
                .OrderBy(name => name, StringComparer.Ordinal).ToArray(), file);
        }

        [Test]
        public static void EveryFunctionIsFoundInTheLibrary()
        {
            NativeLoader.Load();
            foreach (MethodInfo function in Functions())
            {
                Marshal.Prelink(function);
            }
        }

        [Test]
        public static void FunctionsTakePointersAndNumbersOnly()
        {
            foreach (MethodInfo function in Functions())
            {
                IEnumerable<Type> types = function.GetParameters()
                    .Select(parameter => parameter.ParameterType).Append(function.ReturnType);
                foreach (Type type in types)
                {
                    Check.True(type.IsPointer || type.IsPrimitive || type == typeof(void),
                               $"{function.Name}: {type} needs marshalling");
                }
            }
        }

        [Test]
        public static void StructsLieAsInC()
        {
            IEnumerable<string> golden = Golden("layout.txt").Concat(Golden("cuda_layout.txt"));
            string[] order = golden.Where(line => line[0] != ' ')
                .Select(line => line.Split(' ')[0]).ToArray();
            string[] actual = Structs().OrderBy(type => Array.IndexOf(order, type.Name))
                .SelectMany(Describe).ToArray();
            SameLines(golden.ToArray(), actual, "structs");
        }

        private static IEnumerable<Type> Structs()
        {
            return typeof(NativeMethods).Assembly.GetExportedTypes()
                .Where(type => type.Namespace == "Kvrt.Native" && type.IsValueType)
                .Where(type => !type.IsNested);
        }

        private static IEnumerable<string> Describe(Type type)
        {
            FieldInfo[] fields = type.GetFields(BindingFlags.Instance | BindingFlags.Public);
            yield return $"{type.Name} size={Marshal.SizeOf(type)} " +
                         $"alignment={fields.Max(Alignment)}";
            foreach (FieldInfo field in fields)
            {
                yield return $"  {field.Name} offset={Marshal.OffsetOf(type, field.Name)} " +
                             $"size={Size(field.FieldType)}";
            }
        }

        private static int Size(Type type) => type.IsPointer ? IntPtr.Size : Marshal.SizeOf(type);

        private static int Alignment(FieldInfo field)
        {
            bool isArray = field.IsDefined(
                typeof(System.Runtime.CompilerServices.FixedBufferAttribute), false);
            return isArray ? 1 : Size(field.FieldType); // the one array is of bytes
        }

        [Test]
        public static void StructsNeedNoMarshalling()
        {
            foreach (Type type in Structs())
            {
                GCHandle pin = GCHandle.Alloc(Activator.CreateInstance(type), GCHandleType.Pinned);
                pin.Free(); // Alloc throws for what is not blittable
            }
        }

        [Test]
        public static unsafe void LayoutInMemoryIsTheMarshalledOne()
        {
            Check.Equal(Marshal.SizeOf(typeof(kv_tables)), sizeof(kv_tables), "kv_tables");
            Check.Equal(Marshal.SizeOf(typeof(kv_layer)), sizeof(kv_layer), "kv_layer");
            Check.Equal(Marshal.SizeOf(typeof(kv_capabilities_report)),
                        sizeof(kv_capabilities_report), "kv_capabilities_report");
            Check.Equal(Marshal.SizeOf(typeof(kv_append_info)), sizeof(AppendInfo), "AppendInfo");
            Check.Equal(sizeof(ulong), sizeof(Sequence), "Sequence");
        }

        [Test]
        public static void ConstantsAreThoseOfTheHeader()
        {
            string[] constants = typeof(NativeConstants)
                .GetFields(BindingFlags.Static | BindingFlags.Public)
                .Select(field => $"{field.Name} {field.GetRawConstantValue()}").ToArray();
            SameLines(Golden("constants.txt"), constants, "constants");
        }

        /// <summary>Each enumeration has all the values of its family of constants and no others,
        /// but None = 0 for flags.</summary>
        [Test]
        public static void EnumerationsAreComplete()
        {
            var families = new Dictionary<string, Type>
            {
                { "KV_CATEGORY_", typeof(Category) }, { "KV_LOG_", typeof(LogLevel) },
                { "KV_FORMAT_", typeof(StorageFormat) },
                { "KV_STORAGE_", typeof(StorageOptions) }, { "KV_ROPE_", typeof(RopeStyle) },
                { "KV_DEVICE_", typeof(Device) }, { "KV_LAYOUT_", typeof(BlockLayout) },
                { "KV_POOL_", typeof(PoolOptions) }, { "KV_DTYPE_", typeof(DataType) },
                { "KV_ATTEND_", typeof(AttendOptions) }, { "KV_SCORER_", typeof(Scorer) },
                { "KV_SELECT_", typeof(Selection) }, { "KV_POLICY_", typeof(PolicyOptions) },
                { "KV_COMPRESS_", typeof(CompressOutcome) }, { "KV_LIVE_", typeof(LiveKind) },
                { "KV_PRESET_", typeof(Preset) }, { "KV_ALLOCATE_", typeof(Allocator) }
            };
            foreach (KeyValuePair<string, Type> family in families)
            {
                IEnumerable<long> golden = Golden("constants.txt")
                    .Where(line => line.StartsWith(family.Key, StringComparison.Ordinal))
                    .Select(line => long.Parse(line.Split(' ')[1]));
                if (family.Value.IsDefined(typeof(FlagsAttribute), false))
                {
                    golden = golden.Append(0);
                }
                Check.SameElements(golden.OrderBy(value => value),
                                   Enum.GetValues(family.Value).Cast<object>()
                                       .Select(Convert.ToInt64).OrderBy(value => value),
                                   family.Value.Name);
            }
            string[] flags =
            {
                "KV_LAYER_SHARED 1", "KV_LAYER_LANE_PER_HEAD 2", "KV_LAYER_CACHE_POSITIONS 4",
                "KV_SEQ_GATHER_STATISTICS 1"
            };
            Check.SameElements(flags, Golden("constants.txt")
                .Where(line => line.StartsWith("KV_LAYER_", StringComparison.Ordinal) ||
                               line.StartsWith("KV_SEQ_", StringComparison.Ordinal)),
                "flags that are properties and parameters of the safe layer");
        }

        [Test]
        public static void StatusesHaveTheirNamesAndCategories()
        {
            string[] actual = Enum.GetValues(typeof(Status)).Cast<Status>()
                .OrderByDescending(status => (int)status)
                .Select(status => $"{Library.NameOf(status)} {(int)status} " +
                                  $"category {(int)Library.CategoryOf(status)}").ToArray();
            SameLines(Golden("statuses.txt"), actual, "statuses");
            Check.Equal("KV_UNKNOWN", Library.NameOf((Status)(-399)), "name of an unknown status");
            Check.Equal(Category.Capacity, Library.CategoryOf((Status)(-399)), "category of -399");
        }

        /// <summary>Every field that the library fills is a property with its value: each field of
        /// the struct gets a number of its own.</summary>
        [Test]
        public static void ReportsShowEveryField()
        {
            string[] inputs =
            {
                "struct_size", "flags", "next", "reserved0", "item_status_capacity",
                "item_statuses", "sealed_blocks"
            };
            Type[] reports =
            {
                typeof(SequenceInfo), typeof(SequenceLayerInfo), typeof(AppendInfo),
                typeof(ReserveReport), typeof(StepReport), typeof(CompressReport),
                typeof(RetentionInfo), typeof(PolicyFootprint),
                typeof(PoolStats), typeof(ClassStats), typeof(PlanReport), typeof(ExportedTables)
            };
            foreach (Type report in reports)
            {
                ConstructorInfo wrap = report.GetConstructors(
                    BindingFlags.Instance | BindingFlags.NonPublic).Single();
                object native = Activator.CreateInstance(wrap.GetParameters()[0].ParameterType);
                List<FieldInfo> fields = native.GetType().GetFields()
                    .Where(field => !inputs.Contains(field.Name)).ToList();
                if (report == typeof(ExportedTables))
                {
                    fields.RemoveRange(0, fields.FindIndex(field => field.Name == "indices_count"));
                }
                Fill(native, fields);
                object shown = wrap.Invoke(new[] { native });
                for (int i = 0; i < fields.Count; ++i)
                {
                    CheckProperty(report, shown, fields[i].Name, i + 1);
                }
                Check.Equal(fields.Count, report.GetProperties().Length, $"properties of {report}");
            }
        }

        private static void Fill(object native, List<FieldInfo> fields)
        {
            for (int i = 0; i < fields.Count; ++i)
            {
                Type type = fields[i].FieldType;
                if (type.IsPointer)
                {
                    int offset = (int)Marshal.OffsetOf(native.GetType(), fields[i].Name);
                    GCHandle pin = GCHandle.Alloc(native, GCHandleType.Pinned);
                    Marshal.WriteIntPtr(pin.AddrOfPinnedObject(), offset, (IntPtr)(i + 1));
                    pin.Free();
                }
                else
                {
                    fields[i].SetValue(native, Convert.ChangeType(i + 1, type));
                }
            }
        }

        private static void CheckProperty(Type report, object shown, string field, int number)
        {
            string name = string.Concat(field.Split('_')
                .Select(word => char.ToUpperInvariant(word[0]) + word.Substring(1)));
            PropertyInfo property = report.GetProperty(name);
            Check.True(property != null, $"{report.Name} does not show {field}");
            object value = property.GetValue(shown);
            long actual = value is IntPtr ? ((IntPtr)value).ToInt64() : Convert.ToInt64(value);
            Check.Equal(value is bool ? 1 : number, actual, $"{report.Name}.{name}");
        }

        [Test]
        public static void TheVersionIsThatOfTheHeader()
        {
            Check.Equal(NativeConstants.KVRT_VERSION, Library.Version, "version");
        }

        [Test]
        public static unsafe void StructInitZeroesAndSetsTheSize()
        {
            NativeLoader.Load();
            kv_tensor tensor = default;
            tensor.rows = 7;
            NativeMethods.kv_struct_init(&tensor, (uint)sizeof(kv_tensor));
            Check.Equal((uint)sizeof(kv_tensor), tensor.struct_size, "struct_size");
            Check.Equal(0UL, tensor.rows, "rows");
        }

        [Test]
        public static void CapabilitiesAreTheHeaders()
        {
            Capabilities can = Library.GetCapabilities();
            Check.True(can.Supports(StorageFormat.Float32) && can.Supports(StorageFormat.Float16) &&
                       can.Supports(StorageFormat.BFloat16) &&
                       can.Supports(StorageFormat.Affine4) &&
                       !can.Supports((StorageFormat)21), "formats");
            Check.True(can.Supports(Device.Cpu) && !can.Supports(Device.Cuda), "devices");
            Check.True(can.Supports(BlockLayout.Native) && can.Supports(BlockLayout.Hnd) &&
                       can.Supports(BlockLayout.Nhd), "layouts");
            Check.True(can.Supports(Scorer.TriAttention) && !can.Supports((Scorer)63),
                       "scorers");
            Check.True(!can.Supports((BlockLayout)64), "64 is no bit, and not that of 0");
            Check.True(can.Supports(Selection.Union), "selections");
            Check.Equal(32u, can.MinHeadDim, "smallest head");
            Check.Equal(256u, can.MaxHeadDim, "largest head");
            Check.Equal(8u, can.HeadDimMultiple, "multiple");
            Check.Equal(1024u, can.MaxLayers, "layers");
            Check.True(can.SimdTarget.Length != 0 && can.SimdTarget.Length < 32, "target");
        }
    }
}
