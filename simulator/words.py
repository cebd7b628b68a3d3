"""Some nine hundred common English words: what simulated answers and the demo's conversations are made of.

The model folder's tokenizer was trained on them, so that each one, with the space before it, is a single token.
"""

WORDS: tuple[str, ...] = tuple(
    """
    able about above across action active actual address after again against agent ago agree air all allow almost alone
    along already also although always among amount animal another answer any anyone anything appear apply area argue
    arm around arrive art ask attack attention author available avoid away back bad bag ball bank bar base batch be
    beat beautiful because become bed before begin behavior behind believe benefit best better between beyond big bill
    bit black block blood blue board body book born both bottom box boy break bring brother budget build building
    business buy cache call camera campaign can car card care career carry case catch cause cell center central century
    certain chair chance change character charge check child choice choose church chunk citizen city civil claim class
    clear client close coach code cold collection college color come common community company compare compute computer
    concern condition consider contain continue control cost could count country couple course court cover create crime
    cultural culture cup current customer cut dark data daughter day dead deadline deal death debate decade decide
    decision decode deep defense degree demand describe design despite detail determine develop device difference
    different difficult dinner direction director discover discuss disease distance do doctor door down draw dream
    drive drop drug during each early east easy eat economic economy edge education effect effort eight either election
    else employee end energy engine enjoy enough enter entire environment error especially establish even evening event
    ever every evidence exactly example executive exist expect experience expert explain eye face fact factor fail fall
    family far fast father fear federal feel feeling few field fight figure file fill film final finally financial find
    fine finger finish fire firm first fish five flash floor flow fly focus follow food foot force foreign forget form
    former forward four free friend front full function fund future game garden gas gateway general generation get girl
    give glass go goal good government great green ground group grow growth guess hair half hand hang happen happy hard
    have head health hear heart heat heavy help here high history hit hold home hope hospital host hot hotel hour house
    how however huge human hundred husband idea identify idle image imagine impact important improve include increase
    indeed index indicate industry information inside instance instead institution interest international interview
    investment involve island issue item job join just keep key kid kill kind kitchen know knowledge land language
    large last late latency later laugh law lawyer lay lead leader learn least leave left legal length less let letter
    level library lie life light like likely limit line list listen little live load local long look lose loss lot love
    low machine magazine main maintain major majority make man manage management manager many market marriage match
    material matter maybe mean measure media medical meet meeting member memory mention message method middle might
    military million mind minute miss mission model modern moment money month more morning most mother mouth move
    movement movie much music must name nation national natural nature near nearly necessary need network never new
    news next nice night nine none north note nothing notice now number object occur off offer office officer official
    often oil old once one only open operation opportunity option order other outside over own owner page pain paint
    paper parent part particular partner party pass past path patient pattern pause pay peace people percent perform
    performance perhaps period person phone physical pick picture piece place plan plant play player point police
    policy political poor popular population position positive possible power practice prefix prepare present president
    pressure pretty prevent price private probably problem process produce product professor program project prompt
    property protect prove provide public pull purpose push put quality question queue quick quite race radio raise
    range rate rather reach read ready real reality realize really reason receive recent record red reduce reflect
    region relate relationship religious remain remember remove report represent request require research resource
    respond response rest result return reveal rich right rise risk river road rock role room router rule run safe same
    save say scene schedule school science scientist score sea season seat second section security see seek seem sell
    send senior sense series serious serve server service session set seven several shake share shoot short shot should
    shoulder show side sign significant similar simple simply since sing single sister sit site situation six size
    skill skin slow small smile social society soldier some song soon sort sound source south space speak special
    specific speech spend sport spring staff stage stand standard star start state statement station stay step still
    stock stop storage store story strategy stream street strong structure student study stuff style subject success
    such suddenly suffer suggest summer support sure surface system table take talk task tax teach teacher team
    technology television tell ten tend term test than thank the their then theory there thing think third thought
    thousand threat three through throw time today together token tonight tool top total tough toward town trade
    traditional training travel treat treatment tree trial trip trouble true trust truth try turn two type under
    understand unit until up upon use usually value various very victim view violence visit voice vote wait walk wall
    want war warm watch water way weapon wear week weight well west what when where whether which while white who whole
    why wide wife will win wind window wish with within without woman wonder word work worker world worry would write
    writer wrong yard yeah year yes yet young
    """.split()
)
